"""Log-probabilities of ids that were not sampled, against a plain softmax in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fathom.core.errors import RecordError
from fathom.core.records.scores import ComparedIds, IdLists, IdScores, TeacherScores
from fathom.core.records.trajectory import KeptSets
from fathom.model.attention import PackedAttention
from fathom.model.id_logprobs import head_id_logprobs, head_likeliest, id_logprobs, likeliest
from fathom.model.language_model import LanguageModel
from fathom.model.logprobs import token_logprobs
from fathom.model.tiny import make_tiny
from fathom.text.characters import save_character_tokenizer

torch.set_num_threads(1)
N, V = 5, 11
LISTS = IdLists.of([np.array(ids, np.int32) for ids in ([0, 3, 10], [], [2], [1, 4], [4, 5])])
KEPT = KeptSets(offsets=np.array([0, 4, 4, 6, 8, 8], np.int64), ids=np.array([0, 3, 7, 10, 2, 9, 1, 4], np.int32))


def scaled_rows(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(N, V, generator=torch.Generator().manual_seed(seed))


def plain(scaled: torch.Tensor, kept: KeptSets | None) -> torch.Tensor:
    rows = scaled.double()
    for place in range(N):
        ids = kept.of(place) if kept is not None else None
        if ids is not None:
            rows[place, [token for token in range(V) if token not in ids]] = -torch.inf
    return rows.log_softmax(1)


@pytest.mark.parametrize("kept", [None, KEPT])
def test_given_ids_get_their_own_logprobs_with_gradient(kept: KeptSets | None) -> None:
    scaled = scaled_rows().requires_grad_()
    found = id_logprobs(scaled, kept, LISTS)
    expected = plain(scaled, kept)[torch.from_numpy(LISTS.places), torch.from_numpy(LISTS.ids.astype(np.int64))]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    weights = torch.arange(1.0, len(found) + 1)
    (actual,) = torch.autograd.grad((found * weights).sum(), scaled, retain_graph=True)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), scaled)
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", [None, KEPT])
@pytest.mark.parametrize("count", [1, 3, V, V + 5])
def test_the_likeliest_are_the_largest_of_the_kept_set(kept: KeptSets | None, count: int) -> None:
    scaled = scaled_rows(1)
    found, whole = likeliest(scaled, kept, count), plain(scaled, kept)
    for place in range(N):
        own = kept.of(place) if kept is not None else None
        room = V if own is None else len(own)
        ids = found.lists.at(place)
        assert ids.tolist() == sorted(whole[place].argsort(descending=True)[: min(count, room)].tolist())
    by_numpy = IdScores.likeliest(whole.float().numpy(), count)
    assert by_numpy.lists.ids.tolist() == found.lists.ids.tolist()
    np.testing.assert_allclose(by_numpy.logprobs, found.logprobs, atol=1e-6)


def test_blocks_of_hidden_states_change_nothing(tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path)
    make_tiny("arithmetic", 3, tmp_path)
    model = LanguageModel.load(tmp_path, torch.float32, "cpu")
    ids = torch.tensor([1, 5, 9, 4, 7])
    hidden = model.hidden(ids, torch.arange(N), PackedAttention([N])).detach()
    temperature = torch.full((N,), 0.7)
    one, cut = (
        head_id_logprobs(model, hidden, temperature, None, None, LISTS, block_bytes=size) for size in (1 << 20, 8 * 53)
    )
    torch.testing.assert_close(one, cut, rtol=0, atol=1e-6)
    first = token_logprobs(model.logits(hidden)[:1], torch.tensor([3]), temperature[:1], None)
    torch.testing.assert_close(one[1:2], first, rtol=0, atol=1e-6)
    with torch.no_grad():
        whole, parts = (head_likeliest(model, hidden, temperature, None, None, 4, size) for size in (1 << 20, 8 * 53))
    assert whole.lists.ids.tolist() == parts.lists.ids.tolist()
    assert whole.lists.offsets.tolist() == parts.lists.offsets.tolist()


def test_gradients_of_blocks_reach_the_weights(tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path)
    make_tiny("arithmetic", 3, tmp_path)
    model = LanguageModel.load(tmp_path, torch.float32, "cpu")
    weight = next(iter(model.weights().values()))
    gradients = []
    for size in (1 << 20, 8 * 53):
        hidden = model.hidden(torch.tensor([1, 5, 9, 4, 7]), torch.arange(N), PackedAttention([N]))
        weight.grad = None
        head_id_logprobs(model, hidden, torch.ones(N), None, None, LISTS, block_bytes=size).sum().backward()
        assert weight.grad is not None
        gradients.append(weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def scores(**changes: object) -> TeacherScores:
    fields = {
        "teacher": "t",
        "model": "d",
        "temperature": np.ones(2, np.float32),
        "logprobs": np.array([-1.0, -2.0], np.float32),
        "seconds": 0.1,
    }
    return TeacherScores(**(fields | changes))  # pyright: ignore[reportArgumentType]


def test_a_teacher_whose_numbers_are_none_is_refused() -> None:
    scores()
    for logprobs in ([-1.0, np.nan], [-1.0, -np.inf], [-1.0, 0.5]):
        with pytest.raises(RecordError, match="finite and at most 0"):
            scores(logprobs=np.array(logprobs, np.float32))
    with pytest.raises(RecordError, match="temperatures"):
        scores(temperature=np.ones(1, np.float32))
    lists = IdLists.of([np.array([1, 2], np.int32)])
    yes, no = np.ones(2, np.bool_), np.zeros(2, np.bool_)
    half = np.full(2, -0.7, np.float32)
    with pytest.raises(RecordError, match="of its tokens"):
        scores(compared=ComparedIds(lists=lists, logprobs=half, of_student=yes, of_teacher=no))
    with pytest.raises(RecordError, match="neither"):
        ComparedIds(lists=lists, logprobs=half, of_student=no, of_teacher=no)
    with pytest.raises(RecordError, match="beside 2 ids"):
        ComparedIds(lists=lists, logprobs=half[:1], of_student=yes, of_teacher=no)
