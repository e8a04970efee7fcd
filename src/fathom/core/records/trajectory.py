"""The record: one trajectory, with the origin of each of its tokens.

Letters: T tokens of a branch, S sampled tokens of a branch (`S = sampled.sum()`), K kept ids over all sampled
tokens, L MoE layers, E experts chosen per token. Alignment is checked here, where a record is built; readers trust it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from fathom.core.errors import RecordError
from fathom.core.ids import EngineId, GroupId, Occurrence, PolicyVersion, TaskId, TrajectoryId
from fathom.core.records.sampling import FinishReason, SamplingParams
from fathom.core.records.scores import TeacherScores


class TrajectoryStatus(StrEnum):
    """How the episode ended, told from finish reasons, never from looking for an end token."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class Graded(msgspec.Struct, frozen=True, tag="graded.1"):
    """A reward that a grader gave."""

    components: dict[str, float]
    """Named parts of the reward, each finite; the reward is their sum."""
    grader: str
    """Identity of the grader: name and version."""
    answer_found: bool
    """False: the grader found no answer to judge (counted apart from a wrong one)."""
    per_turn: tuple[float, ...] | None = None
    """Reward of each turn, finite. None: the reward belongs to the whole episode."""

    def __post_init__(self) -> None:
        if not self.components or not all(np.isfinite(value) for value in self.components.values()):
            raise RecordError(f"a graded reward needs finite components, got {self.components}")
        if not all(np.isfinite(value) for value in self.per_turn or ()):
            raise RecordError(f"the rewards of turns must be finite, got {self.per_turn}")

    @property
    def total(self) -> float:
        """Sum of the components."""
        return float(sum(self.components.values()))


class Ungraded(msgspec.Struct, frozen=True, tag="ungraded.1"):
    """No reward. An infrastructure failure is this, and never a reward of 0."""

    cause: str
    """Kind of the failure, a short stable word: `grader_timeout`, `grader_error`, `engine_error`, ..."""
    detail: str
    """What a person needs to find the fault."""


Reward = Graded | Ungraded


class TokenizerIdentity(msgspec.Struct, frozen=True, tag="tokenizer.1"):
    """Which text a token id stands for."""

    tokenizer: str
    """BLAKE3 (hex) of the tokenizer's own serialisation."""
    template: str
    """BLAKE3 (hex) of the chat template's text. Empty text hashes too: it means "no template"."""


class KeptSets(msgspec.Struct, frozen=True, tag="kept.1"):
    """The tokens that survived top-k, top-p and min-p, per sampled token, ragged."""

    offsets: np.ndarray
    """int64 [S+1]: token s kept `ids[offsets[s]:offsets[s+1]]`. An empty range means *full*: nothing was removed."""
    ids: np.ndarray
    """int32 [K]: kept token ids, ascending within a token, the sampled one included."""

    def of(self, position: int) -> np.ndarray | None:
        """Kept ids of sampled token `position`; None means the full vocabulary."""
        ids = self.ids[self.offsets[position] : self.offsets[position + 1]]
        return ids if len(ids) else None

    def select(self, positions: np.ndarray) -> KeptSets:
        """The kept sets of a subset of sampled tokens, in the given order."""
        lengths = (self.offsets[1:] - self.offsets[:-1])[positions]
        parts = [self.ids[self.offsets[p] : self.offsets[p + 1]] for p in positions]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return KeptSets(offsets=offsets, ids=np.concatenate([*parts, np.empty(0, np.int32)]).astype(np.int32))


class Turn(msgspec.Struct, frozen=True, tag="turn.1"):
    """One generation call of a branch."""

    start: int
    """Index in the branch of the first sampled token of the call."""
    end: int
    """One past the last sampled token. Equal to `start`: nothing was sampled."""
    engine: EngineId
    """The engine that served it."""
    dtype: str
    """Element type of the weights that computed it, e.g. `float32`."""
    kernels: str
    """Kernel mode: `aligned`, `tiled`, `sdpa`, or an engine's own name for it."""
    sampling: SamplingParams
    """The sampling distribution."""
    finish_reason: FinishReason
    """Why the call ended."""
    prompt_hash: str
    """BLAKE3 (hex) of the int32 prompt ids that the engine executed, reported by the engine."""
    cached_tokens: int
    """Prompt tokens taken from a prefix cache."""
    drafted_tokens: int
    """Tokens guessed by speculation and checked by the model. 0: there was none."""
    accepted_tokens: int
    """Of those, guesses that were right and saved a forward."""
    queue_s: float
    """Seconds from arrival at the engine to the first computation."""
    generate_s: float
    """Seconds from the first computation to the end."""


class TokenBranch(msgspec.Struct, frozen=True, tag="branch.1"):
    """One root-to-leaf path of the token tree. A linear conversation is one branch."""

    parent: int | None
    """Index of the branch it left. None: the first branch."""
    shared_prefix: int
    """Leading tokens it shares with its parent: context here, trained (if at all) in the parent."""
    token_ids: np.ndarray
    """int32 [T]: ids exactly as sent to and sampled by the engine, never re-tokenised."""
    sampled: np.ndarray
    """bool [T]: the policy sampled this token."""
    loss_mask: np.ndarray
    """bool [T]: trained, a subset of `sampled` outside the shared prefix."""
    logprobs: np.ndarray
    """float32 [S]: log-probability under the distribution really sampled from, renormalised over the kept set."""
    policy_version: np.ndarray
    """int32 [S]: number of the version whose weights produced the token."""
    kv_version: np.ndarray
    """int32 [S]: number of the oldest version behind the KV it read, at most its `policy_version`."""
    turns: tuple[Turn, ...]
    """Generation calls in order; their ranges cover the sampled tokens exactly."""
    kept: KeptSets | None = None
    """Kept sets. None: nothing was ever removed (full vocabulary everywhere)."""
    raw_logprobs: np.ndarray | None = None
    """float32 [S]: log-probability at temperature 1 over the full vocabulary. None: not asked for."""
    routes: np.ndarray | None = None
    """uint8 or uint16 [T-1, L, E]: experts of token i as an input. None: not asked for, or a dense model."""
    teacher: TeacherScores | None = None
    """What a teacher says of the tokens with loss. None: none was asked, or none answered."""

    def __post_init__(self) -> None:
        _check_branch(self)

    @property
    def mixed_routes(self) -> np.ndarray:
        """bool [S]: a route before this token was recorded under an older version than the token's own.

        A route is the first one recorded for its position; a version that came later may have computed it again.
        """
        return np.minimum.accumulate(self.kv_version) < self.policy_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One generation call, and what of its prompt an earlier call of its trajectory had computed."""

    turn: Turn
    """The call."""
    known_tokens: int
    """Leading tokens of its prompt that an earlier call had computed: its own branch's turn before it, prompt and
    answer, or what it shares with the branch that it left."""


class TokenPayload(msgspec.Struct, frozen=True, tag="payload.token.1"):
    """The payload of a language model's trajectory."""

    versions: tuple[PolicyVersion, ...]
    """Every version that made a token or KV of it, ordered by number; numbers in the arrays refer to these."""
    branches: tuple[TokenBranch, ...]
    """Branches, parents first."""

    def __post_init__(self) -> None:
        numbers = [version.number for version in self.versions]
        if numbers != sorted(set(numbers)):
            raise RecordError(f"versions must be distinct and ordered by number, got {numbers}")
        for index, branch in enumerate(self.branches):
            if branch.parent is not None and not 0 <= branch.parent < index:
                raise RecordError(f"branch {index} names parent {branch.parent}, which does not come before it")
            if branch.parent is not None:
                _check_shared(index, branch, self.branches[branch.parent])
            unknown = {*branch.policy_version.tolist(), *branch.kv_version.tolist()}.difference(numbers)
            if unknown:
                raise RecordError(f"branch {index} has tokens of unknown versions {sorted(unknown)}")

    @property
    def num_sampled(self) -> int:
        """Sampled tokens, each counted once (shared prefixes belong to the parent)."""
        return sum(int(branch.sampled[branch.shared_prefix :].sum()) for branch in self.branches)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every generation call once."""
        found: list[Call] = []
        for branch in self.branches:
            known = 0  # tokens of the turn before, prompt and answer
            for turn in branch.turns:
                if turn.start >= branch.shared_prefix:
                    known = max(known, min(branch.shared_prefix, turn.start))
                    found.append(Call(turn=turn, known_tokens=known))
                known = turn.end
        return tuple(found)

    @property
    def oldest_version(self) -> int | None:
        """Smallest policy version number of any sampled token. None: nothing was sampled."""
        numbers = [int(branch.policy_version.min()) for branch in self.branches if len(branch.policy_version)]
        return min(numbers) if numbers else None

    @property
    def oldest_kv_version(self) -> int | None:
        """Smallest KV version number of any sampled token. None: nothing was sampled."""
        numbers = [int(branch.kv_version.min()) for branch in self.branches if len(branch.kv_version)]
        return min(numbers) if numbers else None


Payload = TokenPayload
"""The tagged union of payloads; denoising payloads join it later."""


class SessionFacts(msgspec.Struct, frozen=True, tag="session_facts.1"):
    """What happened between an agent and its model, besides the tokens."""

    turns: int
    """Answers of the model."""
    matched: dict[str, int]
    """Calls that went on from a known history, by the strictest reading by which it was equal: `exact`, `json` or
    `content` (`rollout/session/matching.py`)."""
    rendered_whole: int
    """Calls whose context had to be rendered as a whole though their history was known."""
    acting: str
    """How acting ended: `ended`, `timeout` or `failed`. Empty: it did not come to that."""
    detail: str
    """Why, for people. Empty: the agent returned."""
    fault: str
    """What went wrong when the episode was closed, after its reward was given. Empty: nothing."""


class TrajectoryHeader(msgspec.Struct, frozen=True, tag="trajectory.1"):
    """What is known of a trajectory besides its payload."""

    id: TrajectoryId
    """Unique over the run's incarnations."""
    group: GroupId
    """The group (one attempt at an occurrence) it is a member of."""
    member: int
    """Its place in the group, from 0."""
    occurrence: Occurrence
    """The use of the task."""
    attempt: int
    """Which attempt at the occurrence, from 0."""
    task: TaskId
    """The task."""
    status: TrajectoryStatus
    """How it ended."""
    cause: str
    """Why it was truncated, aborted or failed. Empty only when completed."""
    reward: Reward
    """The reward, or why there is none."""
    tokenizer: TokenizerIdentity
    """What its ids mean."""
    adapter: str | None
    """Identity of the LoRA adapter that was active. None: the base model."""
    started_s: float
    """Wall-clock time it started, seconds since the epoch."""
    ended_s: float
    """Wall-clock time it ended, seconds since the epoch."""
    session: SessionFacts | None = None
    """What an agent did. None: the task is single-turn."""

    def __post_init__(self) -> None:
        if (self.status is TrajectoryStatus.COMPLETED) != (self.cause == ""):
            raise RecordError(f"trajectory {self.id}: status {self.status} with cause {self.cause!r}")
        if isinstance(self.reward, Graded) and self.status in (TrajectoryStatus.ABORTED, TrajectoryStatus.FAILED):
            raise RecordError(f"trajectory {self.id}: {self.status} trajectories cannot be graded")


class Trajectory(msgspec.Struct, frozen=True, tag="trajectory_record.1"):
    """One episode, one attempt. Its content hash is kept by the ledger."""

    header: TrajectoryHeader
    """What is known besides the payload."""
    payload: Payload
    """Its tokens."""


def _check_branch(branch: TokenBranch) -> None:
    total, sampled = len(branch.token_ids), int(branch.sampled.sum())
    _require_array("token_ids", branch.token_ids, np.int32, total)
    _require_array("sampled", branch.sampled, np.bool_, total)
    _require_array("loss_mask", branch.loss_mask, np.bool_, total)
    _require_array("logprobs", branch.logprobs, np.float32, sampled)
    _require_array("policy_version", branch.policy_version, np.int32, sampled)
    _require_array("kv_version", branch.kv_version, np.int32, sampled)
    if branch.raw_logprobs is not None:
        _require_array("raw_logprobs", branch.raw_logprobs, np.float32, sampled)
    if total == 0:
        raise RecordError("a branch needs at least one token")
    if not 0 <= branch.shared_prefix <= total or (branch.parent is None and branch.shared_prefix):
        raise RecordError(f"shared_prefix {branch.shared_prefix} does not fit {total} tokens, parent {branch.parent}")
    if np.any(branch.loss_mask & ~branch.sampled) or np.any(branch.loss_mask[: branch.shared_prefix]):
        raise RecordError("loss_mask covers tokens that were not sampled in this branch")
    if branch.sampled[0]:
        raise RecordError("the first token cannot be sampled: it has no left context")
    if not np.all(np.isfinite(branch.logprobs)) or np.any(branch.logprobs > 0):
        raise RecordError("behaviour log-probabilities must be finite and at most 0")
    raw = branch.raw_logprobs
    if raw is not None and (not np.all(np.isfinite(raw)) or np.any(raw > 0)):
        raise RecordError("raw log-probabilities must be finite and at most 0")
    if np.any(branch.kv_version > branch.policy_version):
        raise RecordError("kv_version is newer than the version of the token that read it")
    _check_turns(branch)
    _check_kept(branch, sampled)
    if branch.teacher is not None and len(branch.teacher.logprobs) != (trained := int(branch.loss_mask.sum())):
        raise RecordError(f"a teacher scored {len(branch.teacher.logprobs)} of {trained} tokens with loss")
    if branch.routes is not None and (branch.routes.ndim != 3 or len(branch.routes) != total - 1):
        raise RecordError(f"routes cover {branch.routes.shape} of {total - 1} positions: coverage must be complete")


def _check_shared(index: int, branch: TokenBranch, parent: TokenBranch) -> None:
    """What is context here is trained and counted there, so it must be there."""
    shared = slice(0, branch.shared_prefix)
    same = np.array_equal(branch.token_ids[shared], parent.token_ids[shared])
    if not same or not np.array_equal(branch.sampled[shared], parent.sampled[shared]):
        raise RecordError(
            f"branch {index} shares {branch.shared_prefix} tokens with branch {branch.parent}, which has others there"
        )


def _check_turns(branch: TokenBranch) -> None:
    covered = np.zeros(len(branch.token_ids), dtype=bool)
    previous_end = 0
    for turn in branch.turns:
        if not previous_end <= turn.start <= turn.end <= len(branch.token_ids):
            raise RecordError(f"turn [{turn.start}, {turn.end}) is out of order or range")
        covered[turn.start : turn.end] = True
        previous_end = turn.end
    if not np.array_equal(covered, branch.sampled):
        raise RecordError("the turns do not cover exactly the sampled tokens")


def _check_kept(branch: TokenBranch, sampled: int) -> None:
    if branch.kept is None:
        truncating = [turn for turn in branch.turns if turn.sampling.truncates and turn.end > turn.start]
        if truncating:
            raise RecordError("a truncating sampling distribution needs recorded kept sets")
        return
    kept = branch.kept
    _require_array("kept.offsets", kept.offsets, np.int64, sampled + 1)
    if kept.ids.dtype != np.int32 or kept.offsets[0] != 0 or kept.offsets[-1] != len(kept.ids):
        raise RecordError("kept sets do not fit their offsets")
    if np.any(np.diff(kept.offsets) < 0):
        raise RecordError("kept set offsets decrease")
    for position, token in enumerate(branch.token_ids[branch.sampled]):
        ids = kept.of(position)
        if ids is not None and token not in ids:
            raise RecordError(f"sampled token {token} is not in its own kept set")


def _require_array(name: str, array: np.ndarray, dtype: type, length: int) -> None:
    if array.dtype != np.dtype(dtype) or array.shape != (length,):
        raise RecordError(f"{name} must be {np.dtype(dtype)} [{length}], got {array.dtype} {array.shape}")
