"""Checks on the order of versions, steps and publications, and on the books."""

from __future__ import annotations

from typing import final

from fathom.core.ids import PolicyVersion
from fathom.evidence.contracts.check import Check, Examiner
from fathom.ledger.events import IncarnationOpened, Published, RunEnded, StepTaken
from fathom.ledger.replay import Books


@final
class VersionChecks:
    """Fed with openings, steps and publications in the order of the history."""

    def __init__(self) -> None:
        self._number = 0
        self._weights: dict[int, str] = {}
        self._served: PolicyVersion | None = None
        self._steps = Examiner("steps", "steps count 1, 2, 3, ..., across resumes too")
        self._versions = Examiner("versions", "published versions never restart, and a number has one digest")
        self._delivery = Examiner("delivery", "what was published are the weights that the step left")

    def open(self, event: IncarnationOpened) -> None:
        """The run was started or resumed."""
        self._steps.expect(
            event.start_step == self._number,
            f"incarnation {event.incarnation} starts at step {event.start_step}, the history is at {self._number}",
        )
        self._served = None
        self._number = event.start_step

    def step(self, event: StepTaken) -> None:
        """A step was taken, or was without effect."""
        self._steps.expect(
            event.number == self._number + 1, f"step {event.number} follows a history of {self._number} steps"
        )
        if event.stepped:
            self._number = event.number
            self._weights[event.number] = event.weights_digest

    def publish(self, event: Published) -> None:
        """A version was committed."""
        version, before = event.version, self._served
        if before is None:
            self._versions.expect(
                version.number == self._number,
                f"{version.name} is the first of its incarnation, which is at step {self._number}",
            )
        else:
            newer = version.number > before.number or version == before
            self._versions.expect(
                newer and version.incarnation == before.incarnation, f"{version.name} follows {before.name}"
            )
        self._served = version
        cast = version.digest if event.cast_digest is None else event.cast_digest
        expected = self._weights.setdefault(version.number, cast)
        self._delivery.expect(
            cast == expected and version.number <= self._number,
            f"{version.name} has digest {cast[:12]}, step {version.number} left {expected[:12]}",
        )

    @property
    def results(self) -> list[Check]:
        """What came out."""
        return [self._steps.result, self._versions.result, self._delivery.result]


def check_books(books: Books, ended: RunEnded | None) -> Check:
    """The three books balance; after a run that ended by itself, nothing is still running.

    Args:
        books: folded from the history.
        ended: how the newest incarnation ended. None: it runs, or was killed.
    """
    examiner = Examiner("books", "occurrences, attempts and tokens balance")
    examiner.expect(True, "", count=len(books.occurrences) + len(books.attempts))
    for fault in books.faults:
        examiner.expect(False, fault, count=0)
    total = books.tokens_in_gradient + books.tokens_masked.total() + books.tokens_waiting
    examiner.expect(
        total == books.sampled_tokens, f"{books.sampled_tokens} tokens were sampled, {total} are accounted for"
    )
    if ended is not None:
        for name, entry in books.attempts.items():
            used = entry.waiting and entry.accounted > 0
            examiner.expect(not used, f"trajectory {name} was used by a step and never settled", count=0)
    return examiner.result
