"""The ledger of a run, with a new incarnation opened in it."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version as library_version

from fathom.ledger.events import IncarnationOpened
from fathom.ledger.reader import LedgerReader
from fathom.ledger.writer import LedgerWriter
from fathom.run.history.folder import RootConfig, RunFolder
from fathom.run.history.recorder import Observer, Recorder

_LIBRARIES = ("torch", "transformers", "numpy", "tokenizers", "safetensors")


def open_history(
    config: RootConfig, folder: RunFolder, observers: tuple[Observer, ...], *, parent_seq: int | None, start_step: int
) -> Recorder:
    """Begin an incarnation in the run's ledger, which is made if there is none.

    Args:
        config: the resolved config.
        folder: the run's, locked.
        observers: whoever watches.
        parent_seq: last event of the history that it goes on from. None: a fresh run.
        start_step: optimizer steps behind the weights it starts from.
    """
    if folder.has_history:
        writer = LedgerWriter.open(folder.ledger, fsync=config.ledger.fsync)
        with LedgerReader(folder.ledger) as reader:
            incarnation = 1 + len(reader.events(IncarnationOpened, include_undone=True))
    else:
        writer = LedgerWriter.create(folder.ledger, fsync=config.ledger.fsync)
        incarnation = 1
    recorder = Recorder(writer, observers, incarnation)
    recorder.record(
        IncarnationOpened(
            incarnation=incarnation,
            parent_seq=parent_seq,
            start_step=start_step,
            config=config.model_dump_json(),
            machine=json.dumps(_machine()),
        )
    )
    recorder.commit()
    return recorder


def _machine() -> dict[str, str]:
    facts = {"machine": platform.machine(), "cores": str(os.cpu_count()), "python": platform.python_version()}
    return facts | {name: library_version(name) for name in _LIBRARIES}
