"""Task folders in Harbor's format, run in the local sandbox."""

from fathom.envs.harbor.environment import HarborEnvironment, HarborOptions
from fathom.envs.harbor.folder import HarborTask, read_task

__all__ = ["HarborEnvironment", "HarborOptions", "HarborTask", "read_task"]
