"""Published figures of large clusters, the two constants that are fitted to two of them, and what is then predicted.

Times run from pause to continue on H100 nodes with InfiniBand and buckets of 1 GB, means of steps 3 to 12: Miles, its
page "P2P Weight Transfer"; those of GLM-Z1-9B and Moonlight stand in LMSYS, "Updating 1T parameters in seconds",
2026-04-29. Layouts are theirs; that attention is replicated in GLM-5's engines, and kept in 8 copies in each of
Kimi-K2's, is in that repository's scripts. Architectures are those of the models' own config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from fathom.core.ports.engine import ReceivesInto
from fathom.sync.plan.estimate import Estimate, Scenario, broadcast, p2p
from fathom.sync.plan.fabric import FABRICS, DeltaRates, Fabric, Storage
from fathom.sync.plan.layout import EngineLayout, Topology, TrainerLayout
from fathom.sync.plan.model_size import ModelSize, Served

FITTED_CHAIN = "GLM-4.5-Air"
"""The row whose broadcast figure gives `chain_s`."""
FITTED_LAYOUT = "Qwen3-30B-A3B"
"""The row whose p2p figure gives `layout_bytes_per_s`."""

_SLOWEST_CHAIN_S, _SLOWEST_LAYOUT_S = 1.0, 1e-6
"""Where the search for a constant begins: seconds for a bucket and receiver, and seconds for a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One row of the table."""

    model: ModelSize
    """The model."""
    nodes: int
    """Nodes of the trainer, and as many of the engines."""
    topology: Topology
    """The layouts."""
    broadcast_s: float
    """Measured over broadcast."""
    p2p_s: float
    """Measured over p2p."""
    served: Served = Served.BFLOAT16
    """Element type of the engines."""
    p2p_post_s: float = 0.0
    """Of `p2p_s`: post-processing on the engines, which is not the transport's."""

    def scenario(self, fabric: Fabric) -> Scenario:
        """The same, to be estimated."""
        return Scenario(
            model=self.model,
            served=self.served,
            topology=self.topology,
            fabric=fabric,
            storage=Storage(bytes_per_s=1e9),
            delta=DeltaRates(ratio=1.0, encode_bytes_per_s=1e9, decode_bytes_per_s=1e9),
            receives_into=ReceivesInto.LIVE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A figure beside its prediction."""

    model: str
    """The row."""
    nodes: int
    """Nodes of each side."""
    transport: str
    """`broadcast` or `p2p`."""
    published_s: float
    """What was measured."""
    predicted_s: float
    """What the formulas say."""
    error: float
    """Predicted over published, minus 1."""
    fitted: bool
    """A constant was fitted to this figure: its error says nothing."""
    alone: float | None
    """What the transport's constant would be, had it been fitted to this figure alone, in the constant's unit. None: no
    value reproduces it."""


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """The table, by number of nodes."""
    return tuple(
        PublishedRow(
            model=ModelSize.of_config(_CONFIGS[name], name),
            nodes=nodes,
            topology=Topology(trainer=trainer, engines=engines, one_host=False),
            broadcast_s=broadcast_ms / 1e3,
            p2p_s=p2p_ms / 1e3,
            served=Served.FP8 if name == "Kimi-K2" else Served.BFLOAT16,
            p2p_post_s=0.884 if name == "Kimi-K2" else 0.0,
        )
        for name, nodes, trainer, engines, broadcast_ms, p2p_ms in _ROWS
    )


def check(fabric: Fabric = FABRICS["infiniband-h100"]) -> list[Checked]:
    """Every figure beside its prediction with the constants of `fabric`, in the order of the table."""
    return [
        checked
        for row in published_rows()
        for checked in (
            _checked(row, fabric, "broadcast", row.broadcast_s, row.model.name == FITTED_CHAIN),
            _checked(row, fabric, "p2p", row.p2p_s, row.model.name == FITTED_LAYOUT),
        )
    ]


def fit(fabric: Fabric = FABRICS["infiniband-h100"]) -> Fabric:
    """The fabric with `chain_s` and `layout_bytes_per_s` as the two figures give them."""
    rows = {row.model.name: row for row in published_rows()}
    chain_s = _alone(rows[FITTED_CHAIN], fabric, "broadcast")
    layout = _alone(rows[FITTED_LAYOUT], fabric, "p2p")
    if chain_s is None or layout is None:
        raise AssertionError("the two figures determine the two constants")
    return replace(fabric, chain_s=chain_s, layout_bytes_per_s=layout)


def predict_s(row: PublishedRow, fabric: Fabric, transport: str) -> float:
    """Seconds that the formulas say for a row."""
    estimate: Estimate = (broadcast if transport == "broadcast" else p2p)(row.scenario(fabric))
    return estimate.total_s + (row.p2p_post_s if transport == "p2p" else 0.0)


def _checked(row: PublishedRow, fabric: Fabric, transport: str, published_s: float, fitted: bool) -> Checked:
    predicted_s = predict_s(row, fabric, transport)
    return Checked(
        model=row.model.name,
        nodes=row.nodes,
        transport=transport,
        published_s=published_s,
        predicted_s=predicted_s,
        error=predicted_s / published_s - 1,
        fitted=fitted,
        alone=_alone(row, fabric, transport),
    )


def _alone(row: PublishedRow, fabric: Fabric, transport: str) -> float | None:
    """The constant with which this figure comes out exactly."""
    if transport == "broadcast":
        return _solve(
            lambda value: predict_s(row, replace(fabric, chain_s=value), transport), row.broadcast_s, _SLOWEST_CHAIN_S
        )
    seconds = _solve(
        lambda value: predict_s(row, replace(fabric, layout_bytes_per_s=1 / value), transport),
        row.p2p_s,
        _SLOWEST_LAYOUT_S,
    )
    return None if seconds is None else 1 / seconds


def _solve(rising: Callable[[float], float], goal: float, high: float) -> float | None:
    """Where `rising` reaches `goal` between 0 and `high`. None: nowhere."""
    low = high * 1e-12
    if not rising(low) <= goal <= rising(high):
        return None
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < goal else (low, middle)
    return high


def _mla(heads: int, query: int | None, nope: int, value: int) -> dict[str, int | None]:
    return {
        "num_attention_heads": heads,
        "q_lora_rank": query,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": 64,
        "v_head_dim": value,
    }


def _gqa(heads: int, key_values: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_key_value_heads": key_values, "head_dim": 128}


def _shape(hidden: int, layers: int, inner: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }


def _experts(count: int, inner: int, dense: int, shared: int) -> dict[str, int]:
    return {
        "n_routed_experts": count,
        "moe_intermediate_size": inner,
        "first_k_dense_replace": dense,
        "n_shared_experts": shared,
    }


_GLM_5 = {
    **_mla(64, 2048, 192, 256),
    **_experts(256, 2048, 3, 1),
    "index_n_heads": 32,
    "index_head_dim": 128,
}
_CONFIGS: Mapping[str, Mapping[str, int | None]] = {
    "GLM-Z1-9B": {**_shape(4096, 40, 13696, 151552), **_gqa(32, 2)},
    "Moonlight-16B-A3B": {
        **_shape(2048, 27, 11264, 163840),
        **_mla(16, None, 128, 128),
        **_experts(64, 1408, 1, 2),
    },
    "GLM-4.7-9B-Flash": {
        **_shape(2048, 47, 10240, 154880),
        **_mla(20, 768, 192, 256),
        **_experts(64, 1536, 1, 1),
    },
    "GLM-5, 4 layers": {**_shape(6144, 4, 12288, 154880), **_GLM_5},
    "Qwen3-30B-A3B": {**_shape(2048, 48, 6144, 151936), **_gqa(32, 4), **_experts(128, 768, 0, 0)},
    "GLM-4.5-Air": {**_shape(4096, 46, 10944, 151552), **_gqa(96, 8), **_experts(128, 1408, 1, 1)},
    "Qwen3-235B-A22B": {**_shape(4096, 94, 12288, 151936), **_gqa(64, 4), **_experts(128, 1536, 0, 0)},
    "GLM-5": {**_shape(6144, 78, 12288, 154880), **_GLM_5},
    "Kimi-K2": {**_shape(7168, 61, 18432, 163840), **_mla(64, 1536, 128, 128), **_experts(384, 2048, 1, 1)},
}


def _trainer(gpus: int, tp: int, pp: int, cp: int, ep: int) -> TrainerLayout:
    return TrainerLayout(gpus=gpus, tp=tp, pp=pp, cp=cp, ep=ep)


def _engines(gpus: int, tp: int, ep: int, dp: int = 1) -> EngineLayout:
    return EngineLayout(gpus=gpus, tp=tp, ep=ep, dp=dp)


_ROWS = (
    ("GLM-Z1-9B", 1, _trainer(4, 2, 1, 2, 1), _engines(4, 4, 1), 694.6, 707.1),
    ("Moonlight-16B-A3B", 1, _trainer(8, 2, 1, 1, 8), _engines(8, 8, 8), 1482.0, 1073.3),
    ("GLM-4.7-9B-Flash", 1, _trainer(8, 4, 1, 1, 8), _engines(8, 4, 4), 2508.6, 4229.0),
    ("GLM-5, 4 layers", 1, _trainer(8, 4, 1, 1, 8), _engines(8, 8, 8, 8), 732.2, 1260.8),
    ("Qwen3-30B-A3B", 2, _trainer(16, 4, 1, 1, 8), _engines(16, 8, 8), 2670.0, 2160.2),
    ("GLM-4.5-Air", 4, _trainer(32, 1, 4, 1, 8), _engines(32, 8, 8), 5001.1, 2637.2),
    ("Qwen3-235B-A22B", 8, _trainer(64, 4, 4, 2, 16), _engines(64, 32, 32), 10753.6, 3162.0),
    ("GLM-5", 16, _trainer(128, 4, 8, 2, 16), _engines(128, 64, 64, 64), 58301.5, 8479.7),
    ("Kimi-K2", 32, _trainer(256, 8, 8, 4, 32), _engines(256, 32, 32, 8), 53279.1, 7227.3),
)
"""Model, nodes of each side, layouts, milliseconds over broadcast and over p2p."""
