"""What the history of a run says about starting it again."""

from __future__ import annotations

from fathom.ledger.events import Evaluated, IncarnationOpened, RunEnded
from fathom.ledger.reader import LedgerReader
from fathom.run.history.folder import RootConfig, RunFolder


def ended_as_asked(folder: RunFolder, config: RootConfig) -> str:
    """`steps` or `data` when the newest incarnation had this very config and came to that end. Empty: it goes on."""
    if not folder.has_history:
        return ""
    with LedgerReader(folder.ledger) as reader:
        opened = reader.latest(IncarnationOpened)
        ended = reader.latest(RunEnded)
    if opened is None or ended is None or ended.seq < opened.seq or opened.event.config != config.model_dump_json():
        return ""
    return ended.event.reason if ended.event.reason in ("steps", "data") else ""


def evaluated_last(folder: RunFolder) -> int | None:
    """Number of the version that was evaluated last; a resume undoes those after its checkpoint. None: none was."""
    with LedgerReader(folder.ledger) as reader:
        latest = reader.latest(Evaluated)
    return latest.event.version.number if latest else None
