"""Environments with `reset` and `step`, played by a model in words."""

from fathom.envs.gymnasium.environment import GymnasiumEnvironment, GymnasiumOptions
from fathom.envs.gymnasium.world import World

__all__ = ["GymnasiumEnvironment", "GymnasiumOptions", "World"]
