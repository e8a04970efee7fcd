"""A place of its own for what models ask to have run: no network, nothing of the host but its programs."""

from fathom.envs.sandbox.sandbox import Sandbox
from fathom.envs.sandbox.spec import Ended, Limits, PlacedFile, Ran, SandboxSpec

__all__ = ["Ended", "Limits", "PlacedFile", "Ran", "Sandbox", "SandboxSpec"]
