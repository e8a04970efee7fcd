"""One version on its way into an engine's memory: what every transport's reading side is given."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fathom.core.ids import EngineId
from fathom.core.manifest import Manifest
from fathom.sync.held import Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """Where a version has to go. A reading side overwrites `into` and nothing else."""

    engine: EngineId
    """Who receives."""
    manifest: Manifest
    """What has to arrive. It fits `into`: names, shapes and element types are checked before."""
    into: Mapping[str, Tensor]
    """Contiguous tensors, on any device."""
    serving: Held | None
    """What serves meanwhile, for those that receive only what changed. None: nothing does, or its memory is `into`."""
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set when nobody waits for it any more: return soon, and write nothing afterwards."""
