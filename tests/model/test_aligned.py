"""Aligned mode on real forwards: log-probabilities to the bit, in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import random_model

from fathom.core.errors import ConfigError
from fathom.model.aligned import align
from fathom.model.attention import PackedAttention
from fathom.model.language_model import LanguageModel
from fathom.model.logprobs import head_outputs
from fathom.model.paged_attention import PAGE_TOKENS, KvPages

torch.set_num_threads(1)


def aligned(family, dtype):
    entries = {"head_dim": 16} if family != "qwen2" else {}
    model = LanguageModel(random_model(family, **entries).to(dtype))
    align(model)
    return model


@pytest.fixture(scope="module", params=[(f, d) for f in ("llama", "qwen3") for d in (torch.float32, torch.bfloat16)])
def model(request):
    return aligned(*request.param)


def positions(starts, counts):
    return torch.from_numpy(np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]))


def logprobs(model, hidden, targets):
    return head_outputs(model, hidden, targets, torch.ones(len(targets)), None).logprobs


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=5),
    cuts=st.lists(st.sampled_from([1, 1, 2, 3, 5, 17, 40]), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_a_trained_token_has_the_bits_of_the_sampled_one(model, lengths, cuts, seed):
    generator = np.random.default_rng(seed)
    rows = [torch.from_numpy(generator.integers(0, model.shape.vocab_size, n)) for n in lengths]
    trained: list[list[torch.Tensor]] = []
    hidden = model.hidden(torch.cat(rows), positions([0] * len(rows), lengths), PackedAttention(lengths))
    for row, part in zip(rows, hidden.split(lengths), strict=True):
        trained.append(list(logprobs(model, part[:-1], row[1:]).detach()))
    pages = -(-max(lengths) // PAGE_TOKENS)
    kv = KvPages(model.shape, pages=pages * len(rows), dtype=model.dtype, device="cpu")
    tables = generator.permutation(pages * len(rows)).reshape(len(rows), pages)
    done, step = np.zeros(len(rows), np.int64), 0
    with torch.inference_mode():
        while (running := np.flatnonzero(done < np.array(lengths) - 1)).size:
            which = generator.permutation(running)[: generator.integers(1, len(running) + 1)]
            counts = np.minimum(cuts[step % len(cuts)], np.array(lengths)[which] - 1 - done[which])
            ids = torch.cat([rows[b][done[b] : done[b] + c] for b, c in zip(which, counts, strict=True)])
            out = model.hidden(ids, positions(done[which], counts), kv.plan(tables[which], done[which], counts))
            for b, count, part in zip(which, counts, out.split(counts.tolist()), strict=True):
                targets = rows[b][done[b] + 1 : done[b] + 1 + count]
                for at, value in enumerate(logprobs(model, part, targets)):
                    assert value == trained[b][done[b] + at]
            done[which] += counts
            step += 1


def test_it_changes_no_gradient():
    plain, padded = LanguageModel(random_model("llama", head_dim=16)), aligned("llama", torch.float32)
    row = torch.tensor([3, 1])
    for each in (plain, padded):
        each.logits(each.hidden(row, torch.arange(2), PackedAttention([2]))).square().sum().backward()
    for name, tensor in plain.weights().items():
        other = padded.weights()[name]
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, other.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "dtype", "word"),
    [
        ("qwen3_moe", torch.float32, "qwen3_moe"),
        ("llama", torch.float64, "float64"),
        ("mixtral", torch.bfloat16, "type"),
    ],
)
def test_where_it_does_not_hold_it_is_refused_by_name(family, dtype, word):
    model = LanguageModel(random_model(family, head_dim=16).to(dtype))
    with pytest.raises(ConfigError, match=rf"model\.aligned = true does not hold here: .*{word}"):
        align(model)


def test_heads_that_the_kernel_lacks_are_refused():
    with pytest.raises(ConfigError, match="multiple of 16"):
        align(LanguageModel(random_model("llama", head_dim=24)))


def test_the_self_check_finds_a_forward_that_depends_on_its_batch():
    """A model whose output depends on how many rows there are: as a library that picks kernels by size would."""
    plain = random_model("llama", head_dim=16)
    plain.model.norm.register_forward_hook(lambda _module, _inputs, out: out + 1e-3 * out.shape[1])
    with pytest.raises(ConfigError, match="has other logits than packed"):
        align(LanguageModel(plain))
