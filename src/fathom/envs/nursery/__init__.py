"""A warm process that holds an environment and forks workers from it, each killed with all that it started."""

from fathom.envs.nursery.nursery import Nursery

__all__ = ["Nursery"]
