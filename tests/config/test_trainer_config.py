"""What of optimizer, reference and critic is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from fathom.config.families import OptimizerKind, ReferenceKind
from fathom.config.load import parse_config
from fathom.config.run import RunConfig
from fathom.core.errors import ConfigError

WITHOUT_LIBRARY = """
import sys
sys.modules["bitsandbytes"] = None
import torch
from fathom.config.trainer import OptimizerConfig
from fathom.trainer.backends.optimizers.adam8bit import Adam8bit
Adam8bit({"w": torch.nn.Parameter(torch.zeros(2))}, OptimizerConfig(kind="adam8bit"))
"""


def run_of(trainer: dict[str, Any], objective: dict[str, Any] | None = None) -> RunConfig:
    tree = {
        "name": "x",
        "model": {"tiny": "arithmetic"},
        "task": {"kind": "arithmetic"},
        "rollout": {"max_new_tokens": 8, "max_prompt_tokens": 16},
        "trainer": {"steps": 4, "groups_per_step": 2, **trainer},
        "objective": objective or {},
    }
    return parse_config(tree, "test")


@pytest.mark.parametrize(
    ("trainer", "objective", "says"),
    [
        ({"reference": {"kind": "ema", "decay": 0.9}}, {}, r"\[trainer.reference\] changes nothing"),
        ({"reference": {"kind": "periodic"}}, {"kl_coefficient": 0.1}, "needs every_steps"),
        ({"reference": {"kind": "ema", "decay": 1.0}}, {"kl_coefficient": 0.1}, "less than 1"),
        ({}, {"kind": "ppo"}, r"add \[trainer.critic\]"),
        ({"critic": {}}, {}, "trainer.critic has no use with objective.kind = 'grpo'"),
        ({"critic": {"warmup_steps": 4}}, {"kind": "ppo"}, "leaves the policy none of 4 steps"),
        ({"critic": {"optimizer": {"momentum": 0.9}}}, {"kind": "ppo"}, "momentum changes nothing"),
        ({"optimizer": {"kind": "sgd"}}, {}, "'adamw', 'muon' or 'adam8bit'"),
    ],
)
def test_bad_combinations_are_refused(trainer: dict[str, Any], objective: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_of(trainer, objective)


def test_good_ones_are_taken_and_read_back() -> None:
    config = run_of(
        {
            "optimizer": {"kind": "muon", "momentum": 0.9},
            "reference": {"kind": "periodic", "every_steps": 3},
            "critic": {"warmup_steps": 1, "optimizer": {"kind": "adam8bit"}},
        },
        {"kind": "ppo", "kl_coefficient": 0.1},
    )
    assert config.trainer.optimizer.kind is OptimizerKind.MUON
    assert config.trainer.reference.kind is ReferenceKind.PERIODIC
    assert config.trainer.critic is not None
    assert config.trainer.critic.optimizer.kind is OptimizerKind.ADAM8BIT
    assert parse_config(config.model_dump(mode="json", exclude_unset=True), "again") == config


def test_a_missing_library_is_named_with_its_install_command() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARY], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "optimizer.kind = 'adam8bit' needs the package 'bitsandbytes'" in done.stderr
    assert "pip install 'fathom-rl[adam8bit]'" in done.stderr
