import pytest

pytest.register_assert_rewrite("fathom.rollout.engines.conformance")
