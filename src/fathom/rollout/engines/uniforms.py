"""Random numbers of a request: one uniform per (seed, position), with no state to keep or to lose.

A request therefore samples the same tokens whatever else the engine serves, in whatever batch, after an abort and
a second try as well. Vigna's splitmix64 finaliser, twice: once over the position, once over the seed mixed with it.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniforms in [0, 1), float64 [N], of uint64 [N] `seeds` and int64 [N] `positions` (index in the context)."""
    bits = _mix(seeds.astype(np.uint64) ^ _mix(positions.astype(np.uint64)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    bits = values + _GOLDEN  # array arithmetic wraps silently, which is what is wanted
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return bits ^ (bits >> np.uint64(31))
