"""Tasksets of verifiers, played by verifiers itself in a Python environment of its own."""

from fathom.envs.verifiers.environment import VerifiersEnvironment, VerifiersOptions

__all__ = ["VerifiersEnvironment", "VerifiersOptions"]
