"""Random numbers of a request: one uniform per (seed, position), with no state to keep or to lose.

A request therefore samples the same tokens whatever else the engine serves, in whatever batch, after an abort and
a second try as well. The splitmix64 finaliser, twice: once over the position, once over the seed mixed with it.
"""

from __future__ import annotations

import numpy as np

from fathom.core.splitmix import splitmix64


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniforms in [0, 1), float64 [N], of uint64 [N] `seeds` and int64 [N] `positions` (index in the context)."""
    bits = splitmix64(seeds.astype(np.uint64) ^ splitmix64(positions.astype(np.uint64)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
