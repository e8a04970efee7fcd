"""The one vocabulary of errors.

Every message says what happened and what to do next. Extension code (graders, tasks, engines that are
not ours) raises plain errors; one boundary turns them into these; a bad rollout is data, a dead
component ends the run.
"""

from __future__ import annotations


class FathomError(Exception):
    """Base of all errors raised by Fathom on purpose."""


class ConfigError(FathomError):
    """The run cannot start as configured. Raised while resolving, before anything heavy starts (exit code 2)."""


class MissingDependencyError(ConfigError):
    """An option needs a package that is not installed."""

    def __init__(self, option: str, package: str, extra: str) -> None:
        super().__init__(
            f"{option} needs the package {package!r}, which is not installed; run: pip install 'fathom-rl[{extra}]'"
        )


class DataError(ConfigError):
    """A data file cannot be used as asked. Names the file, the row and what was found."""


class NotAppendableError(FathomError):
    """A chat template cannot go on from what was sampled: the conversation has to be rendered as a whole."""


class RecordError(FathomError):
    """A record contradicts itself (lengths, order, ranges). It never enters the buffer."""


class EngineError(FathomError):
    """An engine failed a call. Names the engine and the reason.

    `may_have_begun` is False only where the engine has provably not begun what it was asked: another may be asked.
    """

    def __init__(self, engine_id: str, reason: str, *, may_have_begun: bool = True) -> None:
        super().__init__(f"engine {engine_id}: {reason}")
        self.engine_id = engine_id
        self.reason = reason
        self.may_have_begun = may_have_begun


class EngineTimeoutError(EngineError):
    """A call to an engine did not end before its deadline."""


class EngineRefusedError(EngineError):
    """The engine understood the request and will not serve it (context full, unknown version, no capability)."""


class EngineDeadError(EngineError):
    """The engine's process has ended. `last_lines` are the last lines of its log."""

    def __init__(self, engine_id: str, reason: str, last_lines: str, *, may_have_begun: bool = True) -> None:
        text = f"{reason}\n--- last lines of its log ---\n{last_lines}"
        super().__init__(engine_id, text, may_have_begun=may_have_begun)
        self.last_lines = last_lines


class SandboxError(FathomError):
    """A sandbox could not be made, is gone, or refused a file. Infrastructure: what ran in it gets no reward for it."""


class UngradedError(FathomError):
    """Raised by a grader that can name why there is no reward: *ungraded* with this cause, never reward 0."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(cause, detail)
        self.cause = cause
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}"


class CutShortError(FathomError):
    """Raised by an agent that a limit of its own or of its world has stopped: graded, and the trajectory is truncated,
    as when its time is over."""


class GraderDeadError(FathomError):
    """The process that keeps the graders has ended. The run cannot go on; resuming loses nothing."""


class TransferInterruptedError(EngineError):
    """An engine did not get a version because the transfer broke elsewhere; the engine itself is well. Try it again."""


class PayloadError(FathomError):
    """A publication is wrong in itself (manifest, names, digest): it is cancelled and the parent goes on serving."""


class DeliveryError(FathomError):
    """A version, right in itself, was not delivered: no room for it, or fewer engines than required took it."""


class BudgetError(FathomError):
    """What must be kept takes more room than was allowed. It is kept; the message says how much would do."""


class AlignmentError(FathomError):
    """Engine and trainer computed other bits in aligned mode. The weights that serve are right; the claim is not."""


class BooksError(FathomError):
    """The books do not balance. No optimizer step is taken."""


class LedgerError(FathomError):
    """The ledger cannot be written or read as asked."""


class CheckpointError(FathomError):
    """A checkpoint is missing, incomplete, or belongs to another run."""


class NoProgressError(FathomError):
    """A stated number of attempts produced nothing to train on."""


class RunStoppedError(FathomError):
    """The run was asked to end while it did something that can be left out or done again. Nothing is lost."""


class StepStoppedError(FathomError):
    """The trainer was told to stop within a step. Weights and optimizer are those of before that step."""
