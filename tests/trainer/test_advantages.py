import pytest
from objective_fixture import VECTORS, close, group_of

from fathom.config.families import Advantage
from fathom.trainer.objective.advantages import ADVANTAGES, group_advantages

NAMES = {
    Advantage.GRPO: "GRPO_sample_std",
    Advantage.DR_GRPO: "Dr_GRPO",
    Advantage.RLOO: "RLOO",
    Advantage.MAXRL: "max_rl_mean_normalised",
}


def values(kind: Advantage, rewards: list[float]) -> list[float]:
    return list(group_advantages(kind, group_of(rewards).rewards).values())


def test_every_advantage_is_implemented():
    assert set(ADVANTAGES) == set(Advantage)


CENTRED = tuple(NAMES)


@pytest.mark.parametrize("kind", CENTRED)
def test_worked_example(kind):
    vector = VECTORS["group_advantages"]
    close(values(kind, vector["inputs"]["reward"]), vector["expected"][NAMES[kind]])


@pytest.mark.parametrize("kind", Advantage)
@pytest.mark.parametrize("rewards", [VECTORS["zero_std_group"]["inputs"]["reward"], [0.1] * 3, [0.7], []])
def test_a_group_that_tells_nothing_apart_has_advantage_exactly_zero(kind, rewards):
    assert values(kind, rewards) == [0.0] * len(rewards)


def test_members_keep_their_own_advantage():
    group = group_of([0.0, 1.0])
    by_member = group_advantages(Advantage.DR_GRPO, group.rewards)
    assert by_member == dict(zip(group.rewards, (-0.5, 0.5), strict=True))


@pytest.mark.parametrize("kind", CENTRED)
def test_advantages_sum_to_zero_and_ignore_a_shift_of_the_rewards(kind):
    rewards = [0.2, 0.9, 0.4, 0.0, 1.0]
    assert sum(values(kind, rewards)) == pytest.approx(0, abs=1e-12)
    if kind is not Advantage.MAXRL:
        assert values(kind, [r + 3 for r in rewards]) == pytest.approx(values(kind, rewards))


def test_maxrl_of_rewards_without_a_positive_mean_is_zero():
    assert values(Advantage.MAXRL, [0.0, 0.0]) == [0, 0]
    assert values(Advantage.MAXRL, [1.0, -1.0]) == [0, 0]


def test_raft_learns_from_the_best_of_a_group_alone():
    assert values(Advantage.RAFT, [0.2, 0.9, -1.0, 0.9]) == [0, 1, 0, 1]
    assert values(Advantage.RAFT, [-3.0, -2.0]) == [0, 1]
