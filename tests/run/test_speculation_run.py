"""Whole runs with speculation: in aligned mode they are those without it, to the bit."""

from pathlib import Path

import pytest
from small_runs import DETERMINISTIC, digests, require_sound, small_config

from fathom import Run
from fathom.evidence.report.summary import summarise
from fathom.ledger.reader import LedgerReader

SHARP = ("rollout.max_new_tokens=24", "rollout.sampling.temperature=0.3", "trainer.steps=4")
NGRAM = "engine.speculation=ngram"


def run(tmp_path: Path, *options: str) -> tuple[dict[int, str], int]:
    """Digests of the weights after each step, and how many drafts were accepted."""
    Run(small_config(tmp_path, *DETERMINISTIC, *SHARP, *options)).start()
    (folder,) = (tmp_path / "runs").iterdir()
    require_sound(folder)
    with LedgerReader(folder / "ledger") as reader:
        summary = summarise(reader)
    assert 0 <= summary.accepted_tokens <= summary.drafted_tokens
    return digests(folder), summary.accepted_tokens


@pytest.mark.slow
def test_an_aligned_run_is_the_same_with_and_without(tmp_path: Path) -> None:
    without, none = run(tmp_path / "without", "model.aligned=true")
    with_it, accepted = run(tmp_path / "with", "model.aligned=true", NGRAM)
    assert with_it == without
    assert accepted > 100
    assert none == 0


@pytest.mark.slow
def test_a_deterministic_run_repeats(tmp_path: Path) -> None:
    one, two = (run(tmp_path / name, NGRAM) for name in ("one", "two"))
    assert one == two
