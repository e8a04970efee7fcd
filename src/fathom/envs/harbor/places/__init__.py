"""Where a Harbor task is worked on and tested: the local sandbox, or one that Harbor itself makes."""

from fathom.envs.harbor.places.local_place import LocalPlace
from fathom.envs.harbor.places.place import Place

__all__ = ["LocalPlace", "Place"]
