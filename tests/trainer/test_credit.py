"""What each token is worth does not depend on rows or their order, and nothing that is masked gets in."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.config.families import KlPlacement, ObjectiveKind
from fathom.config.objective import ObjectiveConfig
from fathom.core.ids import GroupId, TrajectoryId
from fathom.core.records.step import GroupBatch
from fathom.trainer.objective.advantages import group_advantages
from fathom.trainer.objective.credit.assign import BatchTokens, Credit, assign_credit, by_token
from fathom.trainer.objective.credit.returns import whitened

torch.set_num_threads(1)

CREDITED = (
    ObjectiveConfig(kind=ObjectiveKind.REINFORCE_PP, gamma=0.9),
    ObjectiveConfig(kind=ObjectiveKind.REINFORCE_PP, kl_coefficient=0.1, kl_placement=KlPlacement.REWARD),
    ObjectiveConfig(kind=ObjectiveKind.REINFORCE_PP_BASELINE),
    ObjectiveConfig(kind=ObjectiveKind.PPO, gamma=0.95, gae_lambda=0.9),
    ObjectiveConfig(kind=ObjectiveKind.PPO, whiten=False, kl_coefficient=0.1, kl_placement=KlPlacement.REWARD),
    ObjectiveConfig(kl_coefficient=0.1, kl_placement=KlPlacement.REWARD),
    ObjectiveConfig(kind=ObjectiveKind.RLOO, kl_coefficient=0.1, kl_placement=KlPlacement.REWARD, whiten=True),
    ObjectiveConfig(kind=ObjectiveKind.GSPO, whiten=True, mask_truncated=True),
)


@st.composite
def batches(draw: Any) -> tuple[list[GroupBatch], BatchTokens]:
    """Groups of 0 to 4 members, single ones and members without tokens included."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    members = [[TrajectoryId(f"g{g}/m{m}") for m in range(size)] for g, size in enumerate(sizes)]
    lengths = {name: draw(st.integers(0, 5)) for names in members for name in names}
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    groups = [
        GroupBatch(
            group=GroupId(f"g{g}"),
            rewards={name: float(torch.randint(0, 3, (), generator=random)) for name in names},
            truncated=frozenset(),
            rows=(),
        )
        for g, names in enumerate(members)
    ]
    present = [name for name, length in lengths.items() if length]
    sequence = torch.tensor([i for i, name in enumerate(present) for _ in range(lengths[name])], dtype=torch.int64)
    total = len(sequence)

    def figures() -> torch.Tensor:
        return -3 * torch.rand(total, generator=random, dtype=torch.float64)

    old = figures()
    old[torch.rand(total, generator=random) < 0.15] = float("nan")
    return groups, BatchTokens(
        sequence=sequence,
        trajectories=tuple(present),
        place=torch.cat([torch.arange(0), *(torch.arange(lengths[name]) for name in present)]),
        truncated=(torch.rand(len(present), generator=random) < 0.3)[sequence],
        logp_behaviour=figures(),
        logp_old=old,
        logp_ref=figures(),
        values=figures(),
    )


def at(tokens: BatchTokens, index: torch.Tensor) -> BatchTokens:
    """The same tokens, laid out in another way: other rows, in another order."""
    columns = ("sequence", "place", "truncated", "logp_behaviour", "logp_old", "logp_ref", "values")
    return dataclasses.replace(tokens, **{name: getattr(tokens, name)[index] for name in columns})


def columns(credit: Credit) -> list[torch.Tensor]:
    return [credit.advantages] if credit.returns is None else [credit.advantages, credit.returns]


@pytest.mark.parametrize("config", CREDITED, ids=lambda c: f"{c.kind}-{c.kl_placement}-{c.whiten}")
@settings(max_examples=40, deadline=None)
@given(batch=batches(), data=st.data())
def test_rows_and_their_order_do_not_matter(config, batch, data):
    assert by_token(config)
    groups, tokens = batch
    order = torch.tensor(data.draw(st.permutations(range(len(tokens.sequence)))), dtype=torch.int64)
    before = assign_credit(config, groups, tokens)
    after = assign_credit(config, groups[::-1], at(tokens, order))
    for left, right in zip(columns(before), columns(after), strict=True):
        torch.testing.assert_close(right[order.argsort()], left, rtol=1e-12, atol=1e-12)
        assert left.isfinite().all()
        assert not left[~tokens.valid(config)].any()


@pytest.mark.parametrize("config", CREDITED, ids=lambda c: f"{c.kind}-{c.kl_placement}-{c.whiten}")
@settings(max_examples=40, deadline=None)
@given(batch=batches(), bad=st.sampled_from((float("nan"), float("inf"), 1e30)))
def test_garbage_in_a_token_that_is_not_valid_changes_nothing(config, batch, bad):
    groups, tokens = batch
    invalid = ~tokens.valid(config)
    spoilt = dataclasses.replace(
        tokens,
        logp_ref=tokens.logp_ref.masked_fill(invalid, bad),
        values=tokens.values.masked_fill(invalid, bad),
        place=tokens.place * 3 + 1,
    )
    for left, right in zip(
        columns(assign_credit(config, groups, tokens)), columns(assign_credit(config, groups, spoilt)), strict=True
    ):
        assert torch.equal(left, right)


@settings(max_examples=60, deadline=None)
@given(batch=batches())
def test_whitened_advantages_have_mean_zero_and_variance_one(batch):
    groups, tokens = batch
    config = CREDITED[0]
    valid = tokens.valid(config)
    made = assign_credit(config, groups, tokens).advantages[valid]
    if len(made) > 1 and made.any():
        assert float(made.mean()) == pytest.approx(0, abs=1e-9)
        assert float(made.var(correction=1)) == pytest.approx(1, rel=1e-4)
    else:
        assert not made.any()


def test_a_return_is_what_was_earned_from_there_on():
    config = ObjectiveConfig(kind=ObjectiveKind.REINFORCE_PP, gamma=0.5, whiten=False)
    group = GroupBatch(group=GroupId("g"), rewards={TrajectoryId("t"): 8.0}, truncated=frozenset(), rows=())
    tokens = BatchTokens(
        sequence=torch.zeros(4, dtype=torch.int64),
        trajectories=(TrajectoryId("t"),),
        place=torch.tensor([0, 1, 2, 3]),
        truncated=torch.zeros(4, dtype=torch.bool),
        logp_behaviour=torch.tensor([0.0, 0.0, float("nan"), 0.0]),
    )
    assert assign_credit(config, [group], tokens).advantages.tolist() == [2.0, 4.0, 0.0, 8.0]


def test_a_penalty_comes_off_the_reward_before_the_baseline():
    config = ObjectiveConfig(kl_coefficient=0.5, kl_placement=KlPlacement.REWARD, advantage="dr_grpo")
    names = tuple(TrajectoryId(name) for name in "abc")
    rewards = dict(zip(names, (1.0, 1.0, 0.0), strict=True))
    group = GroupBatch(group=GroupId("g"), rewards=rewards, truncated=frozenset(), rows=())
    tokens = BatchTokens(
        sequence=torch.tensor([0, 0, 1]),
        trajectories=names[:2],
        place=torch.tensor([0, 1, 0]),
        truncated=torch.zeros(3, dtype=torch.bool),
        logp_behaviour=torch.zeros(3),
        logp_old=torch.tensor([-1.0, -1.0, -1.0]),
        logp_ref=torch.tensor([-1.5, -2.5, -1.0]),
    )
    expected = group_advantages(config.advantage, {names[0]: 0.0, names[1]: 1.0, names[2]: 0.0})
    made = assign_credit(config, [group], tokens).advantages
    assert made.tolist() == pytest.approx([expected[names[0]], expected[names[0]], expected[names[1]]])


@pytest.mark.parametrize("values", [[], [3.0], [2.0, 2.0, 2.0]])
def test_what_does_not_vary_whitens_to_zero(values):
    tensor = torch.tensor(values)
    assert whitened(tensor, torch.ones(len(values), dtype=torch.bool)).tolist() == [0.0] * len(values)
