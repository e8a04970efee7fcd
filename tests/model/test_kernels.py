"""Attention on the CPU: right, and a row's bits depend on nothing but its own context."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from fathom.model.attention import PackedAttention
from fathom.model.kernels.cpu_attention import PAGE_TOKENS
from fathom.model.kernels.tiled_attention import TiledAttention, computes, page_shapes

torch.set_num_threads(1)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def inputs(lengths, heads, group, dims, value_dims, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    sizes = ((heads * group, dims), (heads, dims), (heads, value_dims))
    return [torch.randn(1, tokens, *size, generator=generator).transpose(1, 2).to(dtype) for size in sizes]


def exact(query, key, value, scaling):
    """float64 causal attention of one sequence: [1, T, Hq, E]."""
    mixed = scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=True, scale=scaling, enable_gqa=True
    )
    return mixed.transpose(1, 2)


def paged(lengths, heads, dims, value_dims, dtype, spare=0, fill=float("nan")):
    """Pages that hold rubbish, and a table that scatters the sequences over them."""
    counts = [-(-length // PAGE_TOKENS) for length in lengths]
    places = np.random.default_rng(0).permutation(sum(counts) + spare)
    tables = np.zeros((len(lengths), max(counts)), np.int64)
    for index, count in enumerate(counts):
        tables[index, :count] = places[sum(counts[:index]) :][:count]
    shapes = page_shapes(len(places), heads, dims, value_dims)
    return tables, *(torch.full(shape, fill, dtype=dtype) for shape in shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "group", "dims", "value_dims"), [(3, 3, 64, 64), (2, 1, 16, 16), (1, 8, 24, 48), (2, 5, 128, 128)]
)
def test_it_is_attention(heads, group, dims, value_dims, dtype):
    lengths = [70, 1, 33]
    query, key, value = inputs(lengths, heads, group, dims, value_dims, dtype)
    out = PackedAttention(lengths).attend(0, query, key, value, dims**-0.5)
    assert out.dtype == dtype
    for begin, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        rows = slice(begin, begin + length)
        reference = exact(query[:, :, rows], key[:, :, rows], value[:, :, rows], dims**-0.5)
        assert (out[:, rows] - reference).abs().max() < TOLERANCE[dtype]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    group=st.integers(1, 9),
    half=st.booleans(),
)
def test_bits_do_not_depend_on_batch_chunks_or_pages(lengths, cuts, group, half):
    dtype = torch.bfloat16 if half else torch.float32
    query, key, value = inputs(lengths, 2, group, 16, 16, dtype)
    together = PackedAttention(lengths).attend(0, query, key, value, 0.25)
    tables, keys, values = paged(lengths, 2, 16, 16, dtype, spare=3)
    begins = np.cumsum([0, *lengths])
    done = np.zeros(len(lengths), np.int64)
    step = 0
    while (done < lengths).any():
        which = np.flatnonzero(done < lengths)
        counts = np.minimum(cuts[step % len(cuts)], np.array(lengths)[which] - done[which])
        at = np.concatenate([begins[b] + done[b] + np.arange(count) for b, count in zip(which, counts, strict=True)])
        plan = TiledAttention(tables[which], done[which], counts)
        out = plan.attend(query[:, :, at], key[:, :, at], value[:, :, at], 0.25, keys, values)
        assert torch.equal(out, together[:, at])
        done[which] += counts
        step += 1


def test_bits_do_not_depend_on_threads():
    lengths = [700, 300]
    query, key, value = inputs(lengths, 2, 4, 64, 64, torch.float32)
    alone = PackedAttention(lengths).attend(0, query, key, value, 0.1)
    torch.set_num_threads(3)
    try:
        assert torch.equal(PackedAttention(lengths).attend(0, query, key, value, 0.1), alone)
    finally:
        torch.set_num_threads(1)


def test_rubbish_in_foreign_pages_and_after_the_end_does_not_leak():
    query, key, value = inputs([40], 1, 2, 16, 16, torch.float32)
    outs: list[torch.Tensor] = []
    for fill in (0.0, float("nan"), float("inf"), 1e30):
        tables, keys, values = paged([40], 1, 16, 16, torch.float32, spare=2, fill=fill)
        plan = TiledAttention(tables, np.array([0]), np.array([40]))
        outs.append(plan.attend(query, key, value, 0.25, keys, values))
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert outs[0].isfinite().all()


def test_large_scores_stay_finite_and_a_nan_stays_visible():
    query, key, value = inputs([20], 1, 1, 16, 16, torch.float32)
    out = PackedAttention([20]).attend(0, query * 1e4, key * 1e4, value, 1.0)
    assert out.isfinite().all()
    value[0, 0, 3, 0] = float("nan")
    out = PackedAttention([20]).attend(0, query, key, value, 1.0)
    assert out[0, 3:, 0, 0].isnan().all()


def test_padding_after_the_plan_is_zero():
    query, key, value = inputs([9], 1, 2, 16, 16, torch.float32)
    out = PackedAttention([6]).attend(0, query, key, value, 0.25)
    assert torch.equal(
        out[:, :6], PackedAttention([6]).attend(0, query[:, :, :6], key[:, :, :6], value[:, :, :6], 0.25)
    )
    assert not out[:, 6:].any()


@pytest.mark.parametrize("lengths", [[5, 9], [7, 7], [40]])
def test_its_gradient_is_that_of_attention(lengths):
    tensors = [tensor.requires_grad_() for tensor in inputs(lengths, 2, 2, 16, 16, torch.float32)]
    weight = torch.randn(1, sum(lengths), 4, 16, generator=torch.Generator().manual_seed(1))
    (PackedAttention(lengths).attend(0, *tensors, 0.25) * weight).sum().backward()
    ours = [tensor.grad for tensor in tensors]
    begins = np.cumsum([0, *lengths])
    copies = [tensor.detach().double().requires_grad_() for tensor in tensors]
    parts = [
        exact(*(copy[:, :, begin : begin + length] for copy in copies), 0.25)
        for begin, length in zip(begins, lengths, strict=False)
    ]
    (torch.cat(parts, dim=1) * weight).sum().backward()
    for got, copy in zip(ours, copies, strict=True):
        assert got is not None
        assert copy.grad is not None
        assert (got - copy.grad).abs().max() < 1e-5


def test_what_it_does_not_compute():
    cpu = torch.device("cpu")
    assert computes(torch.bfloat16, cpu, 64)
    assert not computes(torch.float64, cpu, 64)
    assert not computes(torch.float16, cpu, 64)
    assert not computes(torch.float32, torch.device("cuda"), 64)
    assert not computes(torch.float32, cpu, 24)
