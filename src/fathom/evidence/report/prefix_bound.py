"""What prefix caches could have served at best: each call beside every call before it that they could remember.

Letters: T tokens of a branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import final

import numpy as np

from fathom.core.ids import EngineId, PolicyVersion, TrajectoryId
from fathom.core.records.trajectory import TokenBranch, Trajectory, Turn
from fathom.core.splitmix import splitmix64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    """What a call left in the cache of one engine for the calls under one version."""

    engine: EngineId
    version: PolicyVersion
    began_s: float
    """The earliest moment at which the call can have begun."""
    trajectory: TrajectoryId
    digests: np.ndarray
    """uint64 [T]: for each token of its branch, all tokens up to it."""
    tokens: int
    """Leading tokens whose KV is all of this version."""
    asked: int
    """Of those, the tokens of its prompt that it could have found. 0: it asked under another version."""
    cached: int
    """Tokens of its prompt that it did find."""


@final
class _Cache:
    """Never forgets. Holds the beginnings of all that it holds."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._owed: set[int] = set()
        """Of those, what was found before any call computed it."""

    def serve(self, call: _Context) -> int:
        """Prompt tokens that the call could have found."""
        digests = call.digests[: call.tokens]
        there = self._longest(digests)
        self._held.update(digests[there:].tolist())
        self._owed.difference_update(digests[call.asked :].tolist() if self._owed else ())
        known = min(there, call.asked)
        if call.cached >= known:
            self._owed.update(digests[known : call.cached].tolist())
            return call.cached
        computed = self._owed.intersection(digests[call.cached : known].tolist()) if self._owed else set[int]()
        self._owed -= computed
        return known - len(computed)

    def _longest(self, digests: np.ndarray) -> int:
        """How many leading tokens are held."""
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high) // 2
            if int(digests[middle]) in self._held:
                low = middle + 1
            else:
                high = middle
        return low


def known_at_best(trajectories: Iterable[Trajectory]) -> dict[TrajectoryId, int]:
    """Prompt tokens of each trajectory's calls that a cache without limits would have served.

    One cache per engine and version of the weights, because an update empties it; calls in the order in which the
    record lets them begin; each leaves all its tokens, prompt and sampled, as if it were done before the next one
    begins. The last token of a prompt is computed in any case.

    What a call did find is known, whatever the order says: then a later one of the calls that share it computed it, and
    did not know it; or none in the record did, because evaluation and calls that never arrived are not in it. A call
    that sampled nothing does not say under which version it ran; what it found counts.
    """
    known: dict[TrajectoryId, int] = {}
    contexts: list[_Context] = []
    for trajectory in trajectories:
        name = trajectory.header.id
        known[name] = sum(
            call.turn.cached_tokens for call in trajectory.payload.calls if call.turn.end == call.turn.start
        )
        contexts.extend(_contexts(trajectory))
    contexts.sort(key=lambda each: (each.engine, each.version.order, each.began_s))
    for _, calls in groupby(contexts, key=lambda each: (each.engine, each.version)):
        cache = _Cache()
        for call in calls:
            known[call.trajectory] += cache.serve(call)
    return known


def _contexts(trajectory: Trajectory) -> Iterator[_Context]:
    """What each call that sampled something left, under the version that it asked under first."""
    versions = {version.number: version for version in trajectory.payload.versions}
    for branch in trajectory.payload.branches:
        digests = _digests(branch.token_ids)
        began_s, done = trajectory.header.started_s, 0
        for turn in branch.turns:
            count = turn.end - turn.start
            if count and turn.start >= branch.shared_prefix:
                for number, tokens in _computed(branch, turn, done):
                    asked = number == branch.kv_version[done]
                    yield _Context(
                        engine=turn.engine,
                        version=versions[number],
                        began_s=began_s,
                        trajectory=trajectory.header.id,
                        digests=digests,
                        tokens=tokens,
                        asked=turn.start - 1 if asked else 0,
                        cached=turn.cached_tokens if asked else 0,
                    )
            began_s, done = began_s + turn.queue_s + turn.generate_s, done + count


def _computed(branch: TokenBranch, turn: Turn, done: int) -> Iterator[tuple[int, int]]:
    """Numbers of versions, and how many leading tokens of the call's context had KV of that version alone.

    Args:
        branch: of the call.
        turn: the call, which sampled something.
        done: sampled tokens of the branch before it.
    """
    here = slice(done, done + turn.end - turn.start)
    policy, behind = branch.policy_version[here], branch.kv_version[here]
    first = int(behind[0])
    pure = policy == behind
    for number in {first, *behind[pure].tolist()}:
        places = np.flatnonzero(pure & (behind == number))
        yield number, turn.start + (int(places[-1]) + 1 if len(places) else 0)


def _digests(token_ids: np.ndarray) -> np.ndarray:
    """uint64 [T]: of each token and all before it, equal where all of them are.

    A sum of a well mixed number for each pair of place and token: among 10^7 of them, two that differ meet
    with a probability of 3e-6.
    """
    places = np.arange(len(token_ids), dtype=np.uint64) << np.uint64(32)
    return np.cumsum(splitmix64(places | token_ids.astype(np.uint64)))
