"""How much of a version changes in one optimizer step, and how large a delta that makes."""

from __future__ import annotations

from math import erf, frexp, log2, sqrt

from fathom.core.errors import ConfigError
from fathom.sync.plan.model_size import Served

WEIGHT_STD = 0.02
"""Standard deviation of weights, unless told otherwise."""
_CHANGE_BITS = {Served.BFLOAT16: 4, Served.FP8: 4, Served.FLOAT32: 32}
"""Bits a change costs beside its place. In short types nearly all are to a neighbour; in float32 any bit may differ.

With 4, ratios came out 15 % (learning rate 1e-6, density 0.9 %) and 3 % (3e-6, 2.0 %) below those of the chain's codec
on SmolLM2-135M.
"""
_SMALLEST_RATIO = 1e-6
_SMALLEST_EXPONENT = -60
_LARGEST_EXPONENT = 10


def change_probability(step: float, weight: float, served: Served) -> float:
    """That a weight of this size differs after an update of size `step`, in the element type that is published.

    The full-precision residual is taken to be uniform in the gap between two neighbouring values.
    """
    if not weight:
        return 1.0
    gap = 2.0 ** (_exponent(abs(weight)) - served.fraction_bits)
    return min(1.0, step / gap)


def density(learning_rate: float, served: Served, weight_std: float = WEIGHT_STD) -> float:
    """Share of elements that one Adam step changes, with normal weights: each update is about the learning rate.

    An upper estimate: with warm moments most updates are smaller. Raises ConfigError on a rate that trains nothing.
    """
    if not 0 < learning_rate < 1:
        raise ConfigError(f"a learning rate of {learning_rate:g}? Give --lr between 0 and 1, e.g. 1e-6")
    if not 0 < weight_std < 1e3:
        raise ConfigError(f"weights with a deviation of {weight_std:g}? Give --weight-std, e.g. 0.02")
    total = _mass_below(2.0**_SMALLEST_EXPONENT, weight_std)  # so small that anything changes them
    for exponent in range(_SMALLEST_EXPONENT, _LARGEST_EXPONENT):
        low, high = 2.0**exponent, 2.0 ** (exponent + 1)
        mass = _mass_below(high, weight_std) - _mass_below(low, weight_std)
        total += mass * change_probability(learning_rate, low, served)
    return min(1.0, total)


def delta_ratio(changed: float, served: Served) -> float:
    """Bytes of a delta over full bytes, when this share of the elements changed.

    The places cost their entropy, and a change what the codec of `sync/chain` was seen to take for it. Raises
    ConfigError when it is no share.
    """
    if not 0 <= changed <= 1:
        raise ConfigError(f"a density of {changed:g}? It is the share of elements that change: give --density 0 to 1")
    places = -sum(share * log2(share) for share in (changed, 1 - changed) if share)
    bits = 8 * served.element_bytes
    return min(1.0, max(_SMALLEST_RATIO, (places + changed * _CHANGE_BITS[served]) / bits))


def _mass_below(size: float, std: float) -> float:
    """Share of normal weights smaller than `size`."""
    return erf(size / (std * sqrt(2)))


def _exponent(size: float) -> int:
    """e with 2^e <= size < 2^(e + 1)."""
    return frexp(size)[1] - 1
