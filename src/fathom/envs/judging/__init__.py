"""Rewards from a model that judges, asked at an OpenAI-compatible URL."""

from fathom.envs.judging.judge import Judge, JudgeOptions

__all__ = ["Judge", "JudgeOptions"]
