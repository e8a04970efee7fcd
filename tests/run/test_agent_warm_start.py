"""A warm start where an agent acts: scripts are played for real, and imitated."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathom import Run
from fathom.config.load import load_config
from fathom.core.errors import ConfigError, DataError
from fathom.evidence.runs import tokenizer_of
from fathom.ledger.events import DemonstrationsPlayed, TrajectoryEnded, WarmStartStepped
from fathom.ledger.reader import LedgerReader
from fathom.text.tokenizer import Tokenizer

CONFIG = """
name = "shells"
[model]
tiny = "terminal"
[task]
kind = "shells:Shells"
[warm_start]
tasks = 6
steps = 30
batch_size = 6
[rollout]
group_size = 2
max_in_flight = 4
max_new_tokens = 16
max_prompt_tokens = 112
[engine]
kind = "embedded"
[trainer]
steps = 1
groups_per_step = 2
[trainer.optimizer]
lr = 1e-4
"""
CALL = '<call>{"name": "bash", "arguments": {"command": "get"}}</call><|end|>'


def run_of(tmp_path: Path, *overrides: str) -> Run:
    file = tmp_path / "shells.toml"
    file.write_text(CONFIG)
    return Run(load_config(file, [f'runs_dir="{tmp_path / "runs"}"', *overrides]))


def test_the_policy_imitates_what_the_agent_did_and_meets_the_same_contexts(tmp_path: Path) -> None:
    result = run_of(tmp_path).start()
    with LedgerReader(result.folder / "ledger") as reader:
        played = [entry.event for entry in reader.events(DemonstrationsPlayed)]
        losses = [entry.event.loss for entry in reader.events(WarmStartStepped)]
        ended = [entry.event for entry in reader.events(TrajectoryEnded)]
        branches = [reader.trajectory(end.trajectory).trajectory.payload.branches[0] for end in ended]
    answers = [f"{CALL}", *(f"{100 + 37 * n}<|end|>" for n in range(6))]
    tokenizer = Tokenizer.load(tokenizer_of(result.folder))
    assert played[-1].played == played[-1].of == 6
    assert played[-1].tokens == 6 * len(tokenizer.encode(answers[0])) + sum(
        len(tokenizer.encode(answer)) for answer in answers[1:]
    )
    assert losses[-1] < losses[0] / 4
    for branch in branches:  # the policy learned the call so well that its own rollouts begin with it
        text = "".join(tokenizer.decode_token(token) for token in branch.token_ids.tolist())
        assert text.startswith(f"<|user|>say it<|end|><|assistant|>{CALL}<|tool|>")


@pytest.mark.parametrize(
    ("flaw", "message"),
    [("wrong", "reward 0"), ("long", "1 answers before the end"), ("short", "not played to the end: failed")],
)
def test_a_script_that_does_not_solve_its_task_ends_the_run(tmp_path: Path, flaw: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        run_of(tmp_path, f'task.options.flaw="{flaw}"').start()


def test_an_environment_without_scripts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs demonstrations"):
        run_of(tmp_path, 'task.kind="talks:Talks"')
