"""Proof by behaviour: an engine that cannot digest the memory it computes with must answer as the trainer does.

Bytes that were received right may still not be what an engine computes with: a kernel may keep a packed copy of the
weights before. So it scores a few fixed texts under the new version, each behind a fresh nonce that no cache has seen,
and its answers are compared with those of the trainer at that very version.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np

from fathom.config.families import Dtype
from fathom.core.errors import EngineError
from fathom.core.ids import PolicyVersion
from fathom.core.ports.engine import ScoreRequest
from fathom.sync.receiver import Receiver

Score = Callable[[Sequence[np.ndarray]], Awaitable[list[np.ndarray]]]
"""The trainer's side: float32 [T-1] for each int32 [T], the log-probabilities of all tokens but the first."""

TOLERANCES: dict[Dtype, float] = {Dtype.FLOAT32: 1e-3, Dtype.BFLOAT16: 0.15}
"""Mean absolute difference in nats that other kernels may make on random text; see `sync.probe_tolerance`. Seen of vLLM
in bfloat16 with SmolLM2-135M: 0.103 at most so far."""

_TEXTS, _LENGTH, _NONCE = 4, 48, 8
_SEED = 20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What an engine must answer under one version. Good for that version only."""

    texts: tuple[np.ndarray, ...]
    """int32 [T] each."""
    logprobs: tuple[np.ndarray, ...]
    """float32 [T-1] each: the trainer's, at this version."""
    tolerance: float
    """Largest mean absolute difference, in nats."""

    @classmethod
    async def prepare(cls, score: Score, *, vocab_size: int, longest: int, tolerance: float) -> Self:
        """Ask the trainer, before its weights change. `longest`: tokens that the engine takes at most."""
        texts = _texts(vocab_size, min(longest, _NONCE + _LENGTH))
        return cls(texts=texts, logprobs=tuple(await score(texts)), tolerance=tolerance)

    async def check(self, engine: Receiver, version: PolicyVersion) -> float:
        """Ask the engine that has just committed `version`; returns the mean absolute difference in nats.

        Raises:
            EngineError: it computes with something else than what it received.
        """
        differences: list[np.ndarray] = []
        for index, (text, expected) in enumerate(zip(self.texts, self.logprobs, strict=True)):
            positions = np.arange(1, len(text), dtype=np.int64)
            request = ScoreRequest(
                request_id=f"probe/{version.name}/{secrets.token_hex(4)}/{index}",
                token_ids=text,
                positions=positions,
                temperature=np.ones(len(positions), np.float32),
                kept=None,
                bias=None,
            )
            result = await engine.score(request)
            if result.version != version:
                raise EngineError(engine.id, f"probed at {version.name}, it answered by {result.version.name}")
            differences.append(np.abs(result.logprobs.astype(np.float64) - expected))
        found = float(np.concatenate(differences).mean())
        if not found <= self.tolerance:
            raise EngineError(
                engine.id,
                f"the behavioural probe failed at {version.name}: it differs from the trainer by {found:.4f} nats on "
                f"average, {self.tolerance:g} are allowed (sync.probe_tolerance); it computes with other weights than "
                "those it received",
            )
        return found


def _texts(vocab_size: int, length: int) -> tuple[np.ndarray, ...]:
    """Fixed ids from all over the vocabulary, so that many rows of embedding and head take part, behind fresh ones."""
    fixed = np.random.default_rng(_SEED).integers(0, vocab_size, (_TEXTS, max(0, length - _NONCE)))
    fresh = np.random.default_rng(secrets.randbits(64)).integers(0, vocab_size, (_TEXTS, min(length, _NONCE)))
    return tuple(np.concatenate([fresh, fixed], axis=1).astype(np.int32))
