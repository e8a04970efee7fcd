"""Both roles on one GPU: the whole path, from the warm start to the audit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import require_sound, small_config

from fathom import Run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_trainer_share_a_gpu(tmp_path: Path, dtype: str) -> None:
    config = small_config(
        tmp_path, 'trainer.device="cuda"', 'engine.device="cuda"', f'trainer.dtype="{dtype}"', "trainer.steps=4"
    )
    result = Run(config).start()
    assert result.reason == "steps"
    require_sound(result.folder)
