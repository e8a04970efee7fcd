"""Time travel: a version of a finished run, rebuilt, says of its tokens what was recorded when they were sampled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import digests, require_sound, small_config
from typer.testing import CliRunner

from fathom import Run
from fathom.apps.cli.main import app
from fathom.core.records.trajectory import TokenBranch
from fathom.ledger.events import Published
from fathom.ledger.reader import LedgerReader
from fathom.model.aligned import align
from fathom.model.attention import PackedAttention
from fathom.model.language_model import LanguageModel
from fathom.model.logprobs import head_outputs
from fathom.sync.follow.version_folder import version_in

STEPS, BACK = 9, 7
ALIGNED = ("model.aligned=true", "staleness.max_staleness=2", f"trainer.steps={STEPS}", "rollout.max_new_tokens=16")

pytestmark = pytest.mark.slow


def branches(run: Path) -> Iterator[TokenBranch]:
    with LedgerReader(run / "ledger") as reader:
        for entry in reader.trajectories():
            yield from reader.trajectory(entry.id).trajectory.payload.branches


@torch.no_grad()
def recomputed(model: LanguageModel, branch: TokenBranch) -> np.ndarray:
    """float32: log-probabilities of the sampled tokens, all by this one version."""
    ids = torch.from_numpy(branch.token_ids).long()
    hidden = model.hidden(ids, torch.arange(len(ids)), PackedAttention([len(ids)]))
    at = torch.from_numpy(np.flatnonzero(branch.sampled))
    temperature = np.concatenate(
        [np.full(turn.end - turn.start, turn.sampling.temperature, np.float32) for turn in branch.turns]
    )
    return head_outputs(model, hidden[at - 1], ids[at], torch.from_numpy(temperature), branch.kept).logprobs.numpy()


@pytest.mark.parametrize(
    ("dtype", "sampling"),
    [("float32", ()), ("bfloat16", ("rollout.sampling.top_k=6", "rollout.sampling.temperature=0.8"))],
)
def test_a_rebuilt_version_gives_the_recorded_log_probabilities_to_the_bit(
    tmp_path: Path, dtype: str, sampling: tuple[str, ...]
) -> None:
    outcome = Run(small_config(tmp_path, *ALIGNED, f"trainer.dtype={dtype}", *sampling)).start()
    assert outcome.exit_code == 0
    require_sound(outcome.folder)
    out = tmp_path / "rebuilt"
    done = CliRunner().invoke(app, ["weights", str(outcome.folder), "--version", f"-{BACK}", "--out", str(out)])
    assert done.exit_code == 0, done.exception
    version = version_in(out)
    assert version is not None
    assert version.number == STEPS - BACK
    assert version.digest == digests(outcome.folder)[version.number]

    torch.set_num_threads(1)
    model = LanguageModel.load(out, {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype], "cpu")
    align(model)
    compared, others_differ = 0, False
    for branch in branches(outcome.folder):
        its_own = (branch.policy_version == version.number) & (branch.kv_version == version.number)
        if not len(its_own):
            continue
        found = recomputed(model, branch)
        assert np.array_equal(found[its_own], branch.logprobs[its_own])
        compared += int(its_own.sum())
        others_differ |= bool(np.any(found[~its_own] != branch.logprobs[~its_own]))
    assert compared >= 50
    assert others_differ, "the comparison would have passed with any weights"


def test_every_published_version_of_a_resumed_run_can_be_rebuilt(tmp_path: Path) -> None:
    config = small_config(tmp_path, "trainer.steps=4", "checkpoint.every_steps=3")
    first = Run(config).start()
    text = (first.folder / "config.json").read_text()
    (first.folder / "config.json").write_text(text.replace('"steps": 4', '"steps": 6'))
    second = Run.resume(first.folder).start()
    assert second.exit_code == 0
    with LedgerReader(first.folder / "ledger") as reader:
        versions = [entry.event.version for entry in reader.events(Published)]
    assert {version.incarnation for version in versions} == {1, 2}
    for version in versions:
        out = tmp_path / version.name
        place = ["--version", str(version.number), "--incarnation", str(version.incarnation)]
        done = CliRunner().invoke(app, ["weights", str(first.folder), *place, "--out", str(out)])
        assert done.exit_code == 0, done.exception
        assert version_in(out) == version
