"""Aligned mode: a token's log-probability has the same bits whatever else is computed with it, in engine and trainer.

Attention keeps its bits by construction (`kernels.cpu_attention`). Matrix products do not: libraries choose another
order of summation when there are very few rows. So a forward that has too few is padded to a number of rows at which
this machine's library was seen to give the bits that it gives for many. Functions of single elements (sine, cosine,
SiLU) have other bits where a tensor's last elements do not fill a vector, so rows are padded to whole vectors too.
These are properties of machine and library versions: they are measured for the model's own shapes, and then checked on
the model itself, before anything relies on them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from math import gcd
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from fathom.core.errors import ConfigError
from fathom.model.attention import PackedAttention
from fathom.model.families import ModelFamily
from fathom.model.kernels.tiled_attention import computes
from fathom.model.language_model import LanguageModel
from fathom.model.paged_attention import PAGE_TOKENS, KvPages

FAMILIES = (ModelFamily.LLAMA, ModelFamily.QWEN3)
"""Families whose forward was shown to keep its bits."""

_FEW = 48
"""Up to this many rows, each number is looked at; from there on any number must do."""
_MANY = 384
"""Rows of the reference product."""
_SAMPLES = (49, 63, 64, 65, 96, 127, 200, 257, _MANY)
_OFFSETS = (0, 61)
"""Where in the reference the rows are taken from: their place must not matter either."""
_VECTOR = 32
"""Elements that torch's functions of single elements take at once; the rest is computed one by one."""
_LARGE = 8_000_000
"""Elements of a matrix (an output head) about which less is asked, for it takes long."""
_ASKED_OF_LARGE = 12
_SAMPLES_OF_LARGE = (17, 64, 257)


@final
class SafeRows:
    """Numbers of rows at which products keep their bits."""

    def __init__(self, few: Collection[int], step: int) -> None:
        """`few`: those up to `_FEW`; above it, and below it too, only multiples of `step` are any."""
        self._few = sorted(rows for rows in few if rows % step == 0)
        self._step = step

    def __call__(self, rows: int) -> int:
        """The smallest safe number that is not below `rows`."""
        at = bisect_left(self._few, rows)
        return self._few[at] if at < len(self._few) else -(-rows // self._step) * self._step


def align(model: LanguageModel) -> None:
    """Make the model's rows independent of each other, to the bit, for this process's number of threads.

    Raises:
        ConfigError: it cannot be had for this model, or does not hold on this machine; says what differed.
    """
    if model.family not in FAMILIES:
        raise _refusal(f"it is not known to hold for models of type {model.family} (only {', '.join(FAMILIES)})")
    if not computes(model.dtype, model.device, model.shape.value_head_dim):
        raise _refusal(
            f"there is no aligned attention for {model.dtype} on {model.device} with heads of "
            f"{model.shape.value_head_dim}; it needs float32 or bfloat16, a CPU, and heads of a multiple of 16"
        )
    model.pad_rows(_safe_rows(model))
    with torch.no_grad():
        _check(model)


def _safe_rows(model: LanguageModel) -> SafeRows:
    """What is safe for every matrix; the largest are asked last, and only about what is left."""
    safe = list(range(1, _FEW + 1))
    for outputs, inputs in sorted(model.linear_shapes(), key=lambda shape: shape[0] * shape[1]):
        generator = torch.Generator().manual_seed(outputs * 65_537 + inputs)
        weight, many = _cancelling(outputs, _MANY + max(_OFFSETS), inputs, model.dtype, generator)
        reference = linear(many, weight)
        large = outputs * inputs > _LARGE
        asked = [rows for rows in safe if rows <= _ASKED_OF_LARGE] if large else safe
        unsafe = {rows for rows in asked if not _keeps_bits(many, weight, reference, rows)}
        safe = [rows for rows in safe if rows not in unsafe]
        for rows in _SAMPLES_OF_LARGE if large else _SAMPLES:
            if not _keeps_bits(many, weight, reference, rows):
                raise _refusal(
                    f"a product of {rows} rows with a matrix of {outputs} x {inputs} has other bits than more"
                )
    return SafeRows(safe, max(_VECTOR // gcd(_VECTOR, width) for width in model.elementwise_widths()))


def _cancelling(
    outputs: int, rows: int, inputs: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Matrices [outputs, inputs] and [rows, inputs] whose product would be zero without rounding.

    All that is left is the residue of the order of summation: any other order shows, even in bfloat16.
    """
    places = torch.randperm(inputs // 2 * 2, generator=generator)

    def paired(count: int, sign: float) -> Tensor:
        half = torch.randn(count, inputs // 2, generator=generator).to(dtype)
        whole = torch.zeros(count, inputs, dtype=dtype)
        whole[:, places[: inputs // 2]], whole[:, places[inputs // 2 :]] = half, sign * half
        return whole

    return paired(outputs, 1.0), paired(rows, -1.0)


def _keeps_bits(many: Tensor, weight: Tensor, reference: Tensor, rows: int) -> bool:
    spans = [slice(begin, begin + rows) for begin in _OFFSETS]
    return all(torch.equal(linear(many[span].clone(), weight), reference[span]) for span in spans)


# The check on the model itself ----------------------------------------------------------------------------------------

_LENGTHS = (2 * PAGE_TOKENS + 9, PAGE_TOKENS + 1, 5)
_DECODED = 4


def _check(model: LanguageModel) -> None:
    """Compare a packed forward with the ways an engine computes the same tokens."""
    generator = np.random.default_rng(0)
    lengths = [min(length, model.shape.max_positions) for length in _LENGTHS]
    rows = [generator.integers(0, model.shape.vocab_size, length) for length in lengths]
    packed = _forward(model, rows, PackedAttention(lengths))
    alone = [_forward(model, [row], PackedAttention([len(row)]))[0] for row in rows]
    decoded = _decode(model, rows, chunk=PAGE_TOKENS - 3)
    for index, reference in enumerate(packed):
        for name, other in (("alone", alone[index]), ("in chunks, then token by token", decoded[index])):
            differs = (other != reference).any(dim=1)
            if bool(differs.any()):
                at = int(differs.nonzero()[0])
                far = float((other - reference).abs().max())
                raise _refusal(
                    f"token {at} of a sequence of {len(rows[index])}, computed {name}, has other logits than packed "
                    f"with others (by up to {far:.1e})"
                )


def _forward(model: LanguageModel, rows: Sequence[np.ndarray], plan: PackedAttention) -> list[Tensor]:
    """Logits [length, V] of each row."""
    positions = np.concatenate([np.arange(len(row)) for row in rows])
    hidden = model.hidden(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(positions), plan)
    return list(model.logits(hidden).split([len(row) for row in rows]))


def _decode(model: LanguageModel, rows: Sequence[np.ndarray], chunk: int) -> list[Tensor]:
    """Logits of each row, its tokens computed in chunks over pages, the last ones one by one and all rows at once."""
    pages = -(-max(map(len, rows)) // PAGE_TOKENS)
    kv = KvPages(model.shape, pages=pages * len(rows), dtype=model.dtype, device=model.device)
    tables = np.arange(pages * len(rows)).reshape(len(rows), pages)
    logits: list[list[Tensor]] = [[] for _ in rows]
    done = [0] * len(rows)

    def advance(which: Sequence[int], counts: Sequence[int]) -> None:
        starts = np.array([done[index] for index in which])
        plan = kv.plan(tables[list(which)], starts, np.array(counts))
        new = [rows[index][done[index] : done[index] + count] for index, count in zip(which, counts, strict=True)]
        at = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
        out = model.logits(model.hidden(torch.from_numpy(np.concatenate(new)), torch.from_numpy(at), plan))
        for index, part in zip(which, out.split(list(counts)), strict=True):
            logits[index].append(part)
            done[index] += len(part)

    for index, row in enumerate(rows):
        while (left := len(row) - _DECODED - done[index]) > 0:
            advance([index], [min(chunk, left)])
    while running := [index for index, row in enumerate(rows) if done[index] < len(row)]:
        advance(running, [1] * len(running))
    return [torch.cat(parts) for parts in logits]


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"model.aligned = true does not hold here: {reason} (torch {torch.__version__}, {torch.get_num_threads()} "
        "threads); set model.aligned = false"
    )
