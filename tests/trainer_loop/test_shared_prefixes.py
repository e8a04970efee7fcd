"""What rows begin with alike is computed once: with the same log-probabilities and the same gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_rows import VOCAB, make_group, make_row, save_model

from fathom.config.objective import ObjectiveConfig
from fathom.config.trainer import StalenessConfig, TrainerConfig
from fathom.core.records.step import TrainBatch
from fathom.model.aligned import align
from fathom.model.attention import PackedAttention
from fathom.model.kernels.cpu_attention import PAGE_TOKENS
from fathom.model.language_model import LanguageModel
from fathom.model.logprobs import head_outputs
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.prefixes import segments_of
from fathom.trainer.backends.row_hidden import hidden_before_loss
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.trainer import Trainer
from model.random_models import CONFIGS, MOE, random_model

torch.set_num_threads(1)

_TREES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 90), st.integers(2, 70)), min_size=1, max_size=8)
"""For each row: which earlier one it begins like, for how many tokens, and how many it has of its own."""


def rows_of_tree(tree, vocabulary=VOCAB, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for number, (parent, common, own) in enumerate(tree):
        begin = rows[parent % number].token_ids[:common] if number else np.zeros(0, np.int32)
        ids = np.concatenate([begin, rng.integers(3, vocabulary, own).astype(np.int32)])
        positions = np.unique(rng.integers(1, len(ids), 6))
        row = make_row(rng, f"t{number}", prompt=1, sampled=len(positions))
        rows.append(replace(row, token_ids=ids, positions=positions))
    return rows


@settings(max_examples=80, deadline=None)
@given(_TREES)
def test_every_token_has_its_equal_in_the_same_context_and_no_page_is_computed_twice(tree):
    packed = PackedRows.of_rows(rows_of_tree(tree, vocabulary=5))
    inputs = np.split(packed.input_ids, np.cumsum(packed.lengths)[:-1])
    pages = set()
    for number, ids in enumerate(inputs):
        for place in range(len(ids)):
            end = (place // PAGE_TOKENS + 1) * PAGE_TOKENS
            pages.add((place, tuple(ids[:end])) if end <= len(ids) else (place, number))
    segments = segments_of(packed.input_ids, packed.lengths)
    if segments is None:
        assert len(pages) == len(packed.input_ids)
        return
    assert len(segments.tokens) == sum(segments.lengths) == len(pages) < len(packed.input_ids)
    ends = np.cumsum(segments.lengths)
    home = np.searchsorted(ends, segments.computed, side="right")
    for ids, computed, segment in zip(
        inputs, *(np.split(each, np.cumsum(packed.lengths)[:-1]) for each in (segments.computed, home)), strict=True
    ):
        assert packed.input_ids[segments.tokens[computed]].tolist() == ids.tolist()
        chain = list(dict.fromkeys(segment.tolist()))
        assert [segments.parents[each] for each in chain] == [-1, *chain[:-1]]
        whole = [np.arange(ends[each] - segments.lengths[each], ends[each]) for each in chain]
        assert np.concatenate(whole).tolist() == computed.tolist(), "a row is all of its pieces, in their order"


def outputs(model, packed, *, share):
    hidden = hidden_before_loss(model, packed, share_prefixes=share)
    targets = torch.from_numpy(packed.targets)
    return head_outputs(model, hidden, targets, torch.from_numpy(packed.temperature), None).logprobs


def gradient(model, values, packed, *, share):
    """(values, gradient of a weighted sum of them)."""
    found = values(model, packed, share=share)
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).reshape(found.shape)
    (found * weights).sum().backward()
    taken = {n: t.grad.clone() for n, t in model.weights().items() if t.grad is not None}
    for tensor in model.weights().values():
        tensor.grad = None
    return found.detach(), taken


def agree(model, values, packed, tolerance):
    """Both ways give the same, as far as sums in another order can."""
    (shared, left), (alone, right) = (gradient(model, values, packed, share=share) for share in (True, False))
    torch.testing.assert_close(shared, alone, rtol=tolerance, atol=tolerance)
    scale = max(1.0, *(float(each.abs().max()) for each in right.values()))
    assert left.keys() == right.keys()
    for name, expected in right.items():
        torch.testing.assert_close(left[name], expected, rtol=0, atol=tolerance * scale)


def double_model(family, **entries):
    """In float64 throughout: the norms of the definitions compute in float32, whatever the model's type."""
    plain = random_model(family, max_position_embeddings=256, **entries).double()
    for parent in list(plain.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
                setattr(parent, name, norm)
    return LanguageModel(plain)


_BRANCHES = [(0, 0, 75), (0, 64, 9), (0, 64, 9), (0, 64, 30), (3, 94, 40), (3, 70, 1), (0, 0, 12), (0, 75, 3)]
"""Two depths of common prefixes, equal lengths of own tokens, a row within another, and one that has nothing."""


@pytest.mark.parametrize("family", CONFIGS)
def test_the_gradient_is_that_of_rows_that_share_nothing(family):
    model = LanguageModel(random_model(family, max_position_embeddings=256))
    packed = PackedRows.of_rows(rows_of_tree(_BRANCHES, vocabulary=60))
    segments = segments_of(packed.input_ids, packed.lengths)
    assert segments is not None
    assert len(segments.tokens) < 0.7 * len(packed.input_ids)
    agree(model, outputs, packed, 1e-6)


@pytest.mark.parametrize("family", [family for family in CONFIGS if family not in MOE])
@settings(max_examples=12, deadline=None)
@given(tree=st.one_of(st.just(_BRANCHES), _TREES))
def test_in_float64_it_is_the_same_to_twelve_places(family, tree):
    """Hidden states: the head computes in float32. Experts have no float64 product on a CPU."""
    model = double_model(family)
    agree(model, hidden_before_loss_of, PackedRows.of_rows(rows_of_tree(tree, vocabulary=60)), 1e-12)


def hidden_before_loss_of(model, packed, *, share):
    return hidden_before_loss(model, packed, share_prefixes=share)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_aligned_log_probabilities_keep_their_bits(family, dtype):
    model = LanguageModel(random_model(family, head_dim=16, max_position_embeddings=256).to(dtype))
    align(model)
    packed = PackedRows.of_rows(rows_of_tree(_BRANCHES, vocabulary=60))
    assert torch.equal(outputs(model, packed, share=True), outputs(model, packed, share=False))


@torch.no_grad()
def test_rows_with_recorded_routes_are_computed_each_for_itself():
    model = LanguageModel(random_model("qwen3_moe", max_position_embeddings=256))
    packed = PackedRows.of_rows(rows_of_tree(_BRANCHES, vocabulary=60))
    routing = model.routing(len(packed.input_ids))
    hidden_before_loss(model, packed, routing, share_prefixes=False)
    recorded = replace(packed, routes=routing.chosen)
    routed = model.routing(len(packed.input_ids))
    hidden_before_loss(model, recorded, routed, share_prefixes=True)
    assert np.array_equal(routed.chosen, routing.chosen), "one route for each token of each row"


def test_a_sequence_comes_only_after_an_earlier_one_of_whole_pages():
    for lengths, parents in (([31, 3], [-1, 0]), ([32, 3], [1, -1]), ([32, 3], [-1, 1])):
        with pytest.raises(ValueError, match="cannot come after"):
            PackedAttention(lengths, parents)


# Through the trainer --------------------------------------------------------------------------------------------------


def batch_with_common_prompts():
    rng = np.random.default_rng(0)
    groups = []
    for name in ("g0", "g1"):
        prompt = rng.integers(0, VOCAB, 70).astype(np.int32)
        rows = [make_row(rng, f"{name}/t{i}", prompt=70, sampled=4 + 3 * i) for i in range(4)]
        rows = [replace(row, token_ids=np.concatenate([prompt, row.token_ids[70:]])) for row in rows]
        groups.append(make_group(rows, [1.0, 0.0, 0.25, 0.5], name))
    return TrainBatch(groups=tuple(groups))


class Watched:
    """A backend that keeps the gradient it was about to step by, and how many tokens it was given at once."""

    def __init__(self, backend):
        self._backend = backend
        self.gradient = torch.zeros(0)
        self.sizes = []

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def accumulate(self, rows, loss_of, *, entropy=False):
        self.sizes.append(sum(rows.lengths))
        return self._backend.accumulate(rows, loss_of, entropy=entropy)

    def update(self, *, hold=False):
        self.gradient = torch.cat([m.grad.flatten().clone() for m in self._backend.masters.values()])
        return self._backend.update(hold=hold)


def step(folder, **options):
    config = TrainerConfig(steps=1, groups_per_step=2, tokens_per_micro_batch=180, **options)
    watched = Watched(TorchBackend(folder, config))
    trainer = Trainer(watched, config, ObjectiveConfig(), StalenessConfig())
    trainer.begin()
    (outcome,) = trainer.steps(batch_with_common_prompts(), 0)
    assert outcome.stepped
    return watched


def test_a_step_is_the_same_and_puts_rows_with_a_common_prompt_together(tmp_path):
    folder = save_model(tmp_path / "model")
    shared, again, alone = step(folder), step(folder), step(folder, share_prefixes=False)
    assert torch.equal(shared.gradient, again.gradient)
    scale = float(alone.gradient.abs().max())
    torch.testing.assert_close(shared.gradient, alone.gradient, rtol=0, atol=1e-6 * max(1.0, scale))
    assert len(shared.sizes) == 2, "a group each, of 313 tokens and fewer than 180 different ones"
    assert len(alone.sizes) == 4
