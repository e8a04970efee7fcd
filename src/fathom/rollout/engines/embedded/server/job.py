"""One generation inside the engine's process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import final

import numpy as np

from fathom.core.ports.engine import GenerateRequest
from fathom.rollout.engines.embedded.messages import Streamed
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet

Stream = asyncio.Queue[Streamed | None]
"""Where the answers to the requests of a call go; belongs to the event loop's thread. None: its reader has gone."""


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """From arrival to end."""

    request: GenerateRequest
    """What was asked for."""
    stream: Stream
    """Where its chunks go."""
    arrived_s: float
    """Monotonic time of arrival."""
    pinned: WeightSet | None
    """The weights it must be served by. None: whichever are live."""
    started_s: float | None = None
    """Monotonic time of the first computation. None: there was none yet."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the cache at that time."""
    kept: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """Kept ids of each sampled token that was not sent yet (empty array: full)."""
    ended: bool = False
    """Nothing more will be sent."""
