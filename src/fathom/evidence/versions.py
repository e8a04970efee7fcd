"""Which versions of the weights a run made, and which of them a resume undid, from its ledger alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fathom.ledger.events import IncarnationOpened, Published, StepTaken
from fathom.ledger.reader import LedgerReader


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedVersion:
    """What the ledger says of one version."""

    incarnation: int
    """Incarnation that made it."""
    number: int
    """Optimizer steps behind it."""
    at_s: float
    """Wall-clock time of the newest event that names it."""
    stepped: str | None = None
    """Digest of the weights that the step left. None: no step of this incarnation made it."""
    published: str | None = None
    """Digest of what was published. None: it was not, or that was not recorded."""
    cast: str | None = None
    """Digest of the cast that it was made of; the same, unless it was coded. None: as `published`."""
    undone: bool = True
    """A resume went back behind it."""


def recorded_versions(reader: LedgerReader) -> Mapping[tuple[int, int], RecordedVersion]:
    """Every version that a run made or published, undone ones included, by (incarnation, number)."""
    lineage = reader.lineage()
    found: dict[tuple[int, int], RecordedVersion] = {}
    incarnation = 0

    def note(place: tuple[int, int], seq: int, at_s: float) -> RecordedVersion:
        known = found.get(place) or RecordedVersion(incarnation=place[0], number=place[1], at_s=at_s)
        return replace(known, at_s=at_s, undone=known.undone and seq not in lineage)

    for entry in reader.history((IncarnationOpened, StepTaken, Published), include_undone=True):
        match entry.event:
            case IncarnationOpened() as opened:
                incarnation = opened.incarnation
            case StepTaken() as step if step.stepped:
                place = (incarnation, step.number)
                found[place] = replace(note(place, entry.seq, entry.at_s), stepped=step.weights_digest)
            case Published() as publication:
                place = publication.version.order
                known = note(place, entry.seq, entry.at_s)
                published = publication.version.digest
                found[place] = replace(known, published=published, cast=publication.cast_digest or published)
            case _:
                pass
    return found
