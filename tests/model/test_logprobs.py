from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from random_models import VOCAB, random_model

from fathom.core.errors import RecordError
from fathom.core.records.bias import LogitBias, TokenBias
from fathom.core.records.sampling import SamplingParams
from fathom.core.records.trajectory import KeptSets
from fathom.model import logprobs
from fathom.model.distribution.kept_sets import kept_sets
from fathom.model.language_model import LanguageModel
from fathom.model.logprobs import head_outputs, token_entropies, token_logprobs

torch.set_num_threads(1)

PROBS = torch.tensor([[0.6, 0.3, 0.1]])


def ones(count):
    return torch.ones(count)


def kept_of(*rows):
    lengths = [len(row) for row in rows]
    ids = np.array([token for row in rows for token in row], dtype=np.int32)
    return KeptSets(offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), ids=ids)


def random_logits(rows, vocab=VOCAB, seed=0, scale=4.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def test_a_truncated_token_is_renormalised_over_its_kept_set():
    """`pitfalls.md` 17: ln(2/3) is the sampler's, ln(0.6) would be the full vocabulary's."""
    logits, token = PROBS.log(), torch.tensor([0])
    kept = kept_sets(logits, [SamplingParams(top_p=0.9)])
    assert kept is not None
    assert kept.ids.tolist() == [0, 1]
    got = token_logprobs(logits, token, ones(1), kept)
    assert got.item() == pytest.approx(math.log(2 / 3), abs=1e-6)
    assert token_logprobs(logits, token, ones(1), None).item() == pytest.approx(math.log(0.6), abs=1e-6)


def test_an_empty_range_means_the_full_vocabulary():
    logits, tokens = random_logits(3), torch.tensor([4, 5, 6])
    mixed = token_logprobs(logits, tokens, ones(3), kept_of([], [5, 9], []))
    full = token_logprobs(logits, tokens, ones(3), None)
    assert torch.equal(mixed[[0, 2]], full[[0, 2]])
    expected = torch.log_softmax(logits[1, [5, 9]], dim=0)[0]
    torch.testing.assert_close(mixed[1], expected, atol=1e-6, rtol=0)
    assert torch.equal(token_logprobs(logits, tokens, ones(3), kept_of([], [], [])), full)


def test_a_token_outside_its_kept_set_is_refused():
    with pytest.raises(RecordError, match="not in its own kept set"):
        token_logprobs(random_logits(2), torch.tensor([4, 7]), ones(2), kept_of([4], [5, 9]))


def test_temperature_divides_the_logits():
    logits, tokens = random_logits(4), torch.tensor([1, 2, 3, 4])
    temperature = torch.tensor([0.6, 1.0, 1.3, 2.0])
    expected = torch.log_softmax(logits.double() / temperature.double()[:, None], dim=1)[torch.arange(4), tokens]
    got = token_logprobs(logits, tokens, temperature, None)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)


def test_log_probabilities_are_never_above_zero_and_always_finite():
    logits = torch.zeros(64, 50_000)
    logits[:, 7] = torch.linspace(0, 200, 64)
    for token in (7, 8):
        for kept in (None, kept_of(*[[7, 8]] * 64), kept_of(*[[token]] * 64)):
            got = token_logprobs(logits, torch.full((64,), token), ones(64), kept)
            assert bool((got <= 0).all())
            assert bool(got.isfinite().all())


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="float32"):
        token_logprobs(random_logits(1).bfloat16(), torch.tensor([1]), ones(1), None)


def test_a_bf16_head_gives_the_log_softmax_of_its_logits_in_float32():
    model = LanguageModel(random_model().bfloat16())
    hidden = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = torch.arange(8)
    expected = torch.log_softmax(model.logits(hidden).double(), dim=1)[torch.arange(8), tokens]
    with torch.no_grad():
        together = head_outputs(model, hidden, tokens, ones(8), None).logprobs
        alone = torch.cat(
            [head_outputs(model, hidden[i : i + 1], tokens[i : i + 1], ones(1), None).logprobs for i in range(8)]
        )
    torch.testing.assert_close(together.double(), expected.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(together, alone, atol=0.05, rtol=0)  # a product of one row may round bf16 logits apart
    assert bool((together <= 0).all())


@pytest.mark.parametrize("kept", [None, kept_of([], [1, 2, 60], [2], [], [4, 8], [5], [])], ids=["full", "kept"])
def test_blocks_change_neither_values_nor_gradients(kept):
    model = LanguageModel(random_model())
    hidden = torch.randn(7, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    tokens, temperature = torch.arange(7), torch.linspace(0.5, 1.5, 7)

    def run(block_bytes):
        hidden.grad = None
        got = head_outputs(model, hidden, tokens, temperature, kept, block_bytes=block_bytes).logprobs
        (got * torch.arange(1.0, 8.0)).sum().backward()
        assert hidden.grad is not None
        return got.detach(), hidden.grad

    whole = run(logprobs.BLOCK_BYTES)
    for rows in (2, 4):  # the logits of four blocks are computed again, those of two are kept
        for left, right in zip(whole, run(rows * VOCAB * 4), strict=True):
            torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
    assert bool((whole[1].abs().sum(dim=1) > 0)[[0, 1, 3, 4, 6]].all())
    assert head_outputs(model, hidden[:0], tokens[:0], temperature[:0], None).logprobs.shape == (0,)


@pytest.mark.parametrize("vocab", [3, 128, 300])
def test_gradients_are_those_of_a_log_softmax_over_the_kept_set(vocab):
    tokens, temperature = torch.tensor([2, 0, 1, 2]), torch.tensor([0.5, 1.0, 1.3, 1.0])
    kept = kept_of([0, 2], [], list(range(vocab)), [1, 2])
    bias = TokenBias.of([None, LogitBias(ids=(0, 2), values=(1.5, -3.0)), None, LogitBias(ids=(1,), values=(-0.5,))])

    def gradient(dtype, logprobs_of):
        logits = random_logits(4, vocab).to(dtype).requires_grad_()
        got = logprobs_of(logits)
        (got * torch.tensor([1.0, -2.0, 0.5, 3.0])).sum().backward()
        assert logits.grad is not None
        return got.detach().double(), logits.grad.double()

    def plain(logits):
        rows = []
        for row in range(4):
            added = torch.zeros(vocab, dtype=torch.float64)
            if bias.which[row] >= 0:
                own = bias.biases[bias.which[row]]
                added[list(own.ids)] = torch.tensor(own.values, dtype=torch.float64)
            ids = kept.of(row)
            chosen = list(range(vocab)) if ids is None else ids.tolist()
            scaled = (logits[row] + added) / temperature[row].double()
            rows.append(scaled[tokens[row]] - torch.logsumexp(scaled[chosen], dim=0))
        return torch.stack(rows)

    assert bias is not None
    expected = gradient(torch.float64, plain)
    got = gradient(torch.float32, lambda logits: token_logprobs(logits, tokens, temperature, kept, bias))
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


def test_log_probabilities_are_exact_in_large_vocabularies():
    """A plain float32 sum over this many equal terms is wrong in the fifth digit."""
    logits = torch.full((2, 151_936), -0.4055)
    logits[:, 0] = 0.0
    got = token_logprobs(logits, torch.tensor([0, 5]), ones(2), None)
    expected = torch.log_softmax(logits.double(), dim=1)[torch.arange(2), torch.tensor([0, 5])]
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=0)


def test_the_entropy_and_its_gradient_are_those_of_the_worked_example():
    """`algorithms.md` D.8: z = (2, 1, 0, -1) has H = .947537, and dH/dz = -p (log p + H)."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], requires_grad=True)
    found = token_entropies(logits, ones(1), None)
    assert found.item() == pytest.approx(0.947537, abs=1e-6)
    found.sum().backward()
    logp = torch.log_softmax(logits.detach(), dim=1)
    torch.testing.assert_close(logits.grad, -logp.exp() * (logp + found.detach()), atol=1e-6, rtol=0)


def test_entropies_are_of_the_distribution_that_was_sampled_from():
    temperature = torch.tensor([0.5, 1.0, 2.0])
    bias = TokenBias(biases=(LogitBias(ids=(3,), values=(2.0,)),), which=np.array([-1, 0, -1], np.int32))
    kept = kept_of([], [], [5, 9, 11])
    logits = random_logits(3).requires_grad_()
    found = token_entropies(logits, temperature, kept, bias)
    found.sum().backward()

    plain = logits.detach().clone().requires_grad_()
    shifted = plain + torch.zeros_like(plain).index_put((torch.tensor([1]), torch.tensor([3])), torch.tensor([2.0]))
    rows = [shifted[0] / 0.5, shifted[1], shifted[2, [5, 9, 11]] / 2.0]
    expected = torch.stack([torch.distributions.Categorical(logits=row).entropy() for row in rows])
    expected.sum().backward()
    torch.testing.assert_close(found.detach(), expected.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits.grad, plain.grad, atol=1e-5, rtol=0)


def test_the_entropy_of_a_certain_token_is_zero_and_has_no_gradient():
    logits = torch.tensor([[1000.0, -1000.0, 0.0]], requires_grad=True)
    found = token_entropies(logits, ones(1), None)
    found.sum().backward()
    assert found.item() == 0.0
    assert logits.grad.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("block_bytes", [1, 4 * VOCAB * 3, 2**30])
def test_entropies_by_blocks_are_those_of_all_at_once(block_bytes):
    model = LanguageModel(random_model("llama"))
    width = model.hidden_size
    hidden = torch.randn(8, width, generator=torch.Generator().manual_seed(1))
    tokens, temperature = torch.arange(8), torch.linspace(0.5, 2.0, 8)
    gradients = []
    for size in (block_bytes, 2**30):
        leaf = hidden.clone().requires_grad_()
        found = head_outputs(model, leaf, tokens, temperature, None, with_entropies=True, block_bytes=size)
        assert found.entropies is not None
        (found.logprobs.sum() + 2 * found.entropies.sum()).backward()
        gradients.append(leaf.grad)
        torch.testing.assert_close(found.entropies, token_entropies(model.logits(leaf), temperature, None))
        torch.testing.assert_close(found.logprobs, head_outputs(model, leaf, tokens, temperature, None).logprobs)
    torch.testing.assert_close(gradients[0], gradients[1])
    none = head_outputs(model, hidden[:0], tokens[:0], temperature[:0], None, with_entropies=True)
    assert none.entropies is not None
    assert none.entropies.shape == (0,)
