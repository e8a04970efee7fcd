"""The mismatch between trainer and behaviour, measured over tokens (`algorithms.md` C.2, C.3). Letters: N tokens.

Tokens come from the behaviour policy, so -log r, (log r)^2 / 2 and r - 1 - log r estimate KL(behaviour || trainer).
Measured before any rejection: what a correction does with a token changes only the two shares.
"""

from __future__ import annotations

import numpy as np

from fathom.core.records.step import Mismatch, MismatchSlice
from fathom.trainer.objective.policy_loss import LOG_RATIO_LIMIT


def measure_mismatch(log_ratio: np.ndarray, capped: np.ndarray, rejected: np.ndarray) -> Mismatch | None:
    """Mismatch over the tokens whose log ratio is finite; None when there are none (never zeros).

    Args:
        log_ratio: float [N], log trainer - log behaviour. Clamped to [-20, 20] where it is exponentiated.
        capped: bool [N], correction weight capped.
        rejected: bool [N], correction weight set to 0.
    """
    finite = np.isfinite(log_ratio)
    if not finite.any():
        return None
    d = log_ratio[finite].astype(np.float64)
    bounded = np.clip(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    r = np.exp(bounded)
    p01, p50, p99 = np.percentile(r, (1, 50, 99))
    return Mismatch(
        tokens=len(d),
        abs_log_ratio_mean=float(np.abs(d).mean()),
        abs_log_ratio_max=float(np.abs(d).max()),
        k1=float(-d.mean()),
        k2=float((d**2).mean() / 2),
        k3=float((np.expm1(bounded) - bounded).mean()),
        ratio_mean=float(r.mean()),
        ratio_p01=float(p01),
        ratio_p50=float(p50),
        ratio_p99=float(p99),
        ratio_max=float(r.max()),
        ess=float(r.sum() ** 2 / (len(r) * (r**2).sum())),
        clipped_share=float(capped[finite].mean()),
        popped_share=float(rejected[finite].mean()),
    )


def measure_by_age(
    log_ratio: np.ndarray,
    capped: np.ndarray,
    rejected: np.ndarray,
    ages: np.ndarray,
    kv_ages: np.ndarray,
) -> tuple[MismatchSlice, ...]:
    """The mismatch of each (age, KV age) that has a token with a finite log ratio, in ascending order."""
    slices: list[MismatchSlice] = []
    for age, kv_age in np.unique(np.stack((ages, kv_ages), axis=1), axis=0).tolist():
        here = (ages == age) & (kv_ages == kv_age)
        mismatch = measure_mismatch(log_ratio[here], capped[here], rejected[here])
        if mismatch is not None:
            slices.append(MismatchSlice(age=age, kv_age=kv_age, mismatch=mismatch))
    return tuple(slices)
