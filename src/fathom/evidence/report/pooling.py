"""One mismatch over the tokens of several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fathom.core.records.step import Mismatch, RouteMetrics


def pool(parts: Sequence[Mismatch]) -> Mismatch | None:
    """Pool by tokens. None: there are no tokens.

    Means, shares, maxima and the effective sample size are those of all tokens together; percentiles cannot be
    pooled exactly and are token-weighted means of the parts' percentiles.
    """
    parts = [part for part in parts if part.tokens]
    if not parts:
        return None
    tokens = np.array([part.tokens for part in parts], dtype=np.float64)
    shares = tokens / tokens.sum()

    def weighted(values: list[float]) -> float:
        return float(shares @ np.array(values))

    mean = weighted([part.ratio_mean for part in parts])
    # ess = mean(r)^2 / mean(r^2), so each part's mean(r^2) is known
    square = weighted([part.ratio_mean**2 / part.ess if part.ess else 0.0 for part in parts])
    return Mismatch(
        tokens=int(tokens.sum()),
        abs_log_ratio_mean=weighted([part.abs_log_ratio_mean for part in parts]),
        abs_log_ratio_max=max(part.abs_log_ratio_max for part in parts),
        k1=weighted([part.k1 for part in parts]),
        k2=weighted([part.k2 for part in parts]),
        k3=weighted([part.k3 for part in parts]),
        ratio_mean=mean,
        ratio_p01=weighted([part.ratio_p01 for part in parts]),
        ratio_p50=weighted([part.ratio_p50 for part in parts]),
        ratio_p99=weighted([part.ratio_p99 for part in parts]),
        ratio_max=max(part.ratio_max for part in parts),
        ess=mean**2 / square if square else 0.0,
        clipped_share=weighted([part.clipped_share for part in parts]),
        popped_share=weighted([part.popped_share for part in parts]),
    )


def pool_routes(parts: Sequence[RouteMetrics]) -> RouteMetrics | None:
    """Pool by tokens compared; bytes and seconds are sums, the percentile is a mean. None: there are no tokens."""
    parts = [part for part in parts if part.tokens]
    if not parts:
        return None
    tokens = np.array([part.tokens for part in parts], dtype=np.float64)

    def weighted(values: Sequence[float]) -> float:
        return float(tokens @ np.array(values) / tokens.sum())

    def known(values: Sequence[float | None]) -> float | None:
        return None if None in values else weighted([value for value in values if value is not None])

    return RouteMetrics(
        tokens=int(tokens.sum()),
        agreement=weighted([part.agreement for part in parts]),
        layer_agreement=tuple(map(weighted, zip(*(part.layer_agreement for part in parts), strict=True))),
        overlap=weighted([part.overlap for part in parts]),
        forced_share=weighted([part.forced_share for part in parts]),
        mixed_share=weighted([part.mixed_share for part in parts]),
        margin_mean=known([part.margin_mean for part in parts]),
        margin_p01=known([part.margin_p01 for part in parts]),
        size_bytes=sum(part.size_bytes for part in parts),
        seconds=sum(part.seconds for part in parts),
    )
