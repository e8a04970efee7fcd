import pytest

pytest.register_assert_rewrite("fathom.rollout.engines.conformance", "vllm_rig")

from vllm_rig import vllm_bench, vllm_environment  # noqa: E402 - after its assertions are rewritten

__all__ = ["vllm_bench", "vllm_environment"]
