"""Terminal tasks made from a seed: small words, short files, several steps each."""

from fathom.envs.harbor.generating.draw import draw
from fathom.envs.harbor.generating.write import write_tasks

__all__ = ["draw", "write_tasks"]
