"""Vigna's splitmix64 finaliser."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def splitmix64(values: np.ndarray) -> np.ndarray:
    """uint64 [N] of uint64 [N] `values`: a bijection of 64 bits in which every input bit reaches every output bit."""
    bits = values + _GOLDEN  # array arithmetic wraps silently, which is what is wanted
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return bits ^ (bits >> np.uint64(31))
