"""What a ledger says of versions: who made them, and which a resume undid."""

from __future__ import annotations

from pathlib import Path

from fathom.evidence.versions import recorded_versions
from fathom.ledger.reader import LedgerReader
from synthetic.history import History, config


def test_a_resume_undoes_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    history, settings = History(tmp_path), config(steps=4)
    history.open(settings)
    history.publish(0, digest="0")
    history.train(1, history.group(0), digest="1")
    history.publish(1, digest="1")
    at = history.checkpoint(1)
    history.train(2, history.group(1), digest="2")
    history.publish(2, digest="2")
    history.end(1, reason="stopped")
    history = History(tmp_path, resumed=True)
    history.open(settings, incarnation=2, parent_seq=at, step=1)
    history.publish(1, digest="1")
    history.train(2, history.group(1), digest="2'")
    history.train(3, history.group(1), digest="2'", stepped=False)
    history.end(2)
    with LedgerReader(tmp_path) as reader:
        found = recorded_versions(reader)
    facts = {place: (each.stepped, each.published, each.undone) for place, each in found.items()}
    assert facts == {
        (1, 0): (None, "0", False),
        (1, 1): ("1", "1", False),
        (1, 2): ("2", "2", True),
        (2, 1): (None, "1", False),
        (2, 2): ("2'", None, False),
    }


def test_a_version_whose_step_stands_stands_though_its_publication_is_undone(tmp_path: Path) -> None:
    """It was on its way while the checkpoint was written."""
    history, settings = History(tmp_path), config(steps=4)
    history.open(settings)
    history.train(1, history.group(0), digest="1")
    at = history.checkpoint(1)
    history.publish(1, digest="1")
    history.end(1, reason="stopped")
    history = History(tmp_path, resumed=True)
    history.open(settings, incarnation=2, parent_seq=at, step=1)
    history.end(1)
    with LedgerReader(tmp_path) as reader:
        assert not recorded_versions(reader)[1, 1].undone


def test_of_a_coded_version_the_cast_is_told_beside_what_was_published(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.open(config(steps=4))
    history.publish(0, digest="coded", cast_digest="cast")
    history.train(1, history.group(0), digest="1")
    history.publish(1, digest="1")
    history.end(1)
    with LedgerReader(tmp_path) as reader:
        facts = [(each.published, each.cast) for each in recorded_versions(reader).values()]
    assert facts == [("coded", "cast"), ("1", "1")]
