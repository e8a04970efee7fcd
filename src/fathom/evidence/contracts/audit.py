"""Every contract of a run, examined again from its ledger and from nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fathom.config.load import parse_section
from fathom.config.trainer import StalenessConfig
from fathom.core.errors import LedgerError, RecordError
from fathom.evidence.contracts.check import Check
from fathom.evidence.contracts.run_checks import VersionChecks, check_books
from fathom.evidence.contracts.token_checks import TokenChecks
from fathom.evidence.contracts.trained_rows import trained_rows
from fathom.ledger.entries import Recorded
from fathom.ledger.events import EngineServes, Event, IncarnationOpened, Published, RunEnded, StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.ledger.replay import replay

_KINDS: tuple[type[Event], ...] = (IncarnationOpened, EngineServes, Published, StepTaken)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What an audit found."""

    last_seq: int
    """Newest event it looked at."""
    steps: int
    """Steps it looked at."""
    checks: tuple[Check, ...]
    """All checks, passed or not."""

    @property
    def passed(self) -> bool:
        """True when every check passed."""
        return all(check.passed for check in self.checks)


def audit(reader: LedgerReader) -> AuditReport:
    """Examine the surviving lineage of a run. It may be running.

    Raises:
        LedgerError: the ledger has no events, or its index cannot be read. Damaged records are failures of a check.
    """
    last = reader.last_seq
    if not last:
        raise LedgerError("the ledger is empty: the run never started")
    tokens, versions = TokenChecks(reader.lineage(last)), VersionChecks()
    bounds: StalenessConfig | None = None
    steps = 0
    for recorded in reader.history(_KINDS, until=last):
        match recorded.event:
            case IncarnationOpened() as event:
                bounds = _bounds(event)
                tokens.open(records_routes=_records_routes(event))
                versions.open(event)
            case EngineServes() as event:
                tokens.serve(event.engine, event.version)
            case Published() as event:
                versions.publish(event)
            case StepTaken() as event:
                assert bounds is not None, "a writer opens an incarnation first"
                steps += 1
                versions.step(event)
                _examine(reader, Recorded(seq=recorded.seq, at_s=recorded.at_s, event=event), tokens, bounds)
            case _:
                pass
    ended = reader.latest(RunEnded, until=last)
    opened = reader.latest(IncarnationOpened, until=last)
    current = ended is not None and opened is not None and ended.seq > opened.seq
    books = check_books(replay(reader, until=last), ended.event if ended is not None and current else None)
    return AuditReport(last_seq=last, steps=steps, checks=(*tokens.results, *versions.results, books))


def _bounds(event: IncarnationOpened) -> StalenessConfig:
    """The bounds an incarnation ran under."""
    try:
        return parse_section(StalenessConfig, json.loads(event.config).get("staleness", {}), "staleness")
    except ValueError as error:
        raise LedgerError(f"the config of incarnation {event.incarnation} is not JSON: {error}") from error


def _records_routes(event: IncarnationOpened) -> bool:
    """Whether an incarnation asked for expert routes."""
    return bool(json.loads(event.config).get("rollout", {}).get("record_routes", False))


def _examine(reader: LedgerReader, step: Recorded[StepTaken], tokens: TokenChecks, bounds: StalenessConfig) -> None:
    try:
        tokens.step(step, list(trained_rows(reader, step)), bounds)
    except (LedgerError, RecordError) as error:
        tokens.unreadable(step, error)
