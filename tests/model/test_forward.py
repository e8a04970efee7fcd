"""The forward that engine and trainer share, against the plain one of `transformers`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_models import CONFIGS, packed, random_ids, random_model, split

from fathom.model.attention import PackedAttention
from fathom.model.language_model import LanguageModel
from fathom.model.paged_attention import KvPages

torch.set_num_threads(1)


def close(left, right, tolerance=1e-5):
    torch.testing.assert_close(left, right, atol=tolerance, rtol=0)


@pytest.fixture(params=list(CONFIGS))
def family(request):
    return request.param


@pytest.mark.parametrize("lengths", [(5, 6, 7), (4, 4, 4), (3, 5, 5, 1), (9,)])
def test_packed_rows_equal_plain_rows(family, lengths):
    plain, model = random_model(family), LanguageModel(random_model(family))
    rows = random_ids(*lengths)
    with torch.no_grad():
        ours = split(model.logits(model.hidden(*packed(rows))), rows)
        for row, logits in zip(rows, ours, strict=True):
            close(logits, plain(row.unsqueeze(0)).logits[0])


def test_gradients_equal_those_of_plain_rows(family):
    plain, model = random_model(family), LanguageModel(random_model(family))
    rows = random_ids(5, 6, 7)
    model.logits(model.hidden(*packed(rows))).square().sum().backward()
    sum(plain(row.unsqueeze(0)).logits.square().sum() for row in rows).backward()
    expected = dict(plain.named_parameters())
    for name, tensor in model.weights().items():
        if name not in expected:
            continue  # a buffer
        reference = expected[name].grad
        assert tensor.grad is not None
        assert reference.abs().max() > 0
        close(tensor.grad / reference.abs().max(), reference / reference.abs().max(), 1e-4)


def test_a_row_does_not_see_its_neighbours():
    model = LanguageModel(random_model())
    first, second, other = random_ids(5, 6, 6, seed=3)
    with torch.no_grad():
        before = model.hidden(*packed([first, second]))[:5]
        after = model.hidden(*packed([first, other]))[:5]
    assert torch.equal(before, after)


def test_a_plan_refuses_other_tokens_than_its_own():
    model = LanguageModel(random_model())
    with pytest.raises(ValueError, match="covers 3 tokens"):
        model.hidden(torch.arange(4), torch.arange(4), PackedAttention([3]))
    with pytest.raises(ValueError, match="at least one token"):
        PackedAttention([3, 0])


def plan_of(kv, tables, starts, lengths):
    return kv.plan(np.array(tables), np.array(starts), np.array(lengths))


def kv_of(model, pages=8):
    return KvPages(model.shape, pages=pages, dtype=model.dtype, device=model.device)


def positions(starts, lengths):
    return torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])


@torch.no_grad()
def test_chunks_and_single_tokens_in_one_forward_equal_the_whole(family):
    model = LanguageModel(random_model(family))
    rows = random_ids(40, 9, 36)
    whole = split(model.hidden(*packed(rows)), rows)
    kv, tables = kv_of(model), [[5, 2], [1, 0], [7, 3]]  # a short sequence ignores what lies after its pages
    starts = [0, 0, 0]
    for lengths in ([30, 5, 33], [4, 1, 1], [1, 1, 1], [5, 2, 1]):
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        got = model.hidden(
            torch.cat([row[start:end] for row, start, end in zip(rows, starts, ends, strict=True)]),
            positions(starts, lengths),
            plan_of(kv, tables, starts, lengths),
        )
        close(got, torch.cat([hidden[start:end] for hidden, start, end in zip(whole, starts, ends, strict=True)]))
        starts = ends
    assert starts == [len(row) for row in rows]


@torch.no_grad()
def test_a_full_page_is_shared_and_a_part_of_one_is_copied(family):
    model = LanguageModel(random_model(family))
    prompt, first, second = random_ids(37, 3, 3)
    rows = [torch.cat([prompt, first]), torch.cat([prompt, second])]
    whole = split(model.hidden(*packed(rows)), rows)
    kv = kv_of(model)
    model.hidden(prompt, torch.arange(37), plan_of(kv, [[1, 4]], [0], [37]))
    kv.copy(4, 6)
    got = model.hidden(
        torch.cat([first, second]), positions([37, 37], [3, 3]), plan_of(kv, [[1, 4], [1, 6]], [37, 37], [3, 3])
    )
    close(got, torch.cat([hidden[37:] for hidden in whole]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@torch.no_grad()
def test_packed_and_paged_forwards_agree_on_a_gpu():
    model = LanguageModel(random_model("qwen3").to("cuda"))
    rows = [row.cuda() for row in random_ids(36, 38)]
    ids, places, plan = packed([row.cpu() for row in rows])
    whole = split(model.hidden(ids.cuda(), places.cuda(), plan), rows)
    kv, tables = kv_of(model), [[0, 3], [2, 1]]
    prompt = torch.cat([row[:35] for row in rows])
    model.hidden(prompt, positions([0, 0], [35, 35]).cuda(), plan_of(kv, tables, [0, 0], [35, 35]))
    got = model.hidden(
        torch.stack([row[35] for row in rows]),
        torch.tensor([35, 35], device="cuda"),
        plan_of(kv, tables, [35, 35], [1, 1]),
    )
    close(got, torch.stack([hidden[35] for hidden in whole]), 1e-4)
