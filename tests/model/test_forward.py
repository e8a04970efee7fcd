"""The forward that engine and trainer share, against the plain one of `transformers`."""

from __future__ import annotations

import pytest
import torch
from random_models import CONFIGS, packed, random_ids, random_model, split

from fathom.model.attention import PackedAttention
from fathom.model.cached_attention import KvCache
from fathom.model.language_model import LanguageModel

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


def cache_of(model, slots=4):
    return KvCache(model.shape, slots=slots, max_tokens=32, dtype=model.dtype, device=model.device)


def positions(starts, lengths):
    return torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])


@pytest.mark.parametrize("slots", [(0, 1, 2), (3, 0, 2)])
@torch.no_grad()
def test_prefill_in_pieces_and_decode_equal_the_whole(family, slots):
    model = LanguageModel(random_model(family))
    rows = random_ids(12, 9, 12)
    whole = split(model.hidden(*packed(rows)), rows)
    cache = cache_of(model)

    starts, lengths = [0, 0, 0], [4, 6, 4]
    got = model.hidden(
        torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)]),
        positions(starts, lengths),
        cache.prefill(slots, starts, lengths),
    )
    close(got, torch.cat([hidden[:n] for hidden, n in zip(whole, lengths, strict=True)]))

    got = model.hidden(
        torch.cat([rows[0][4:9], rows[2][4:5]]), positions([4, 4], [5, 1]), cache.prefill(slots[::2], [4, 4], [5, 1])
    )
    close(got, torch.cat([whole[0][4:9], whole[2][4:5]]))

    held = [9, 6, 5]
    for _ in range(3):
        tokens = torch.stack([row[n] for row, n in zip(rows, held, strict=True)])
        got = model.hidden(tokens, torch.tensor(held), cache.decode(slots, held))
        close(got, torch.stack([hidden[n] for hidden, n in zip(whole, held, strict=True)]))
        held = [n + 1 for n in held]


@torch.no_grad()
def test_a_copied_prefix_goes_on_in_every_slot():
    model = LanguageModel(random_model())
    prompt, first, second = random_ids(5, 3, 3)
    rows = [torch.cat([prompt, first]), torch.cat([prompt, second])]
    whole = split(model.hidden(*packed(rows)), rows)
    cache = cache_of(model)
    model.hidden(prompt, torch.arange(5), cache.prefill([1], [0], [5]))
    cache.copy_prefix(1, [0, 3], 5)
    got = model.hidden(torch.cat([first, second]), positions([5, 5], [3, 3]), cache.prefill([0, 3], [5, 5], [3, 3]))
    close(got, torch.cat([hidden[5:] for hidden in whole]))


def test_a_cache_refuses_what_does_not_fit():
    cache = cache_of(LanguageModel(random_model()))
    with pytest.raises(ValueError, match="33 tokens does not fit into slots of 32"):
        cache.decode([0], [32])
    with pytest.raises(ValueError, match="its own slot"):
        cache.prefill([0, 0], [0, 0], [1, 1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@torch.no_grad()
def test_packed_and_cached_forwards_agree_on_a_gpu():
    model = LanguageModel(random_model("qwen3").to("cuda"))
    rows = [row.cuda() for row in random_ids(6, 8)]
    ids, places, plan = packed([row.cpu() for row in rows])
    whole = split(model.hidden(ids.cuda(), places.cuda(), plan), rows)
    cache = cache_of(model)
    prompt = torch.cat([row[:5] for row in rows])
    model.hidden(prompt, positions([0, 0], [5, 5]).cuda(), cache.prefill([0, 2], [0, 0], [5, 5]))
    got = model.hidden(
        torch.stack([row[5] for row in rows]), torch.tensor([5, 5], device="cuda"), cache.decode([0, 2], [5, 5])
    )
    close(got, torch.stack([hidden[5] for hidden in whole]), 1e-4)
