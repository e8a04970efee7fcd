"""Named objectives: what they stand for, and what they refuse before anything starts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pydantic import ValidationError

from fathom.config.families import Advantage, Aggregation, Correction, KlEstimator, ObjectiveKind
from fathom.config.load import parse_config
from fathom.config.objective import ObjectiveConfig
from fathom.config.objectives import OBJECTIVES
from fathom.config.objectives.declaration import ADVANTAGE_OPTIONS, LOSS_OPTIONS, RecordField
from fathom.core.errors import ConfigError

NEEDED: dict[ObjectiveKind, dict[str, Any]] = {
    ObjectiveKind.DR_GRPO: {"constant_length": 8},
    ObjectiveKind.DAPO: {"overlong_limit": 8, "overlong_buffer": 2},
}


def of_kind(kind: ObjectiveKind, **options: Any) -> ObjectiveConfig:
    return ObjectiveConfig(kind=kind, **NEEDED.get(kind, {}), **options)


def run_of(objective: dict[str, Any], **options: Any):
    tree = {
        "name": "x",
        "model": {"tiny": "arithmetic"},
        "task": {"kind": "arithmetic"},
        "rollout": {"max_new_tokens": 8, "max_prompt_tokens": 16, **options.pop("rollout", {})},
        "trainer": {"steps": 4, "groups_per_step": 2, **options.pop("trainer", {})},
        "objective": objective,
        **options,
    }
    return parse_config(tree, "test")


def test_every_kind_is_declared():
    assert set(OBJECTIVES) == set(ObjectiveKind)


@pytest.mark.parametrize("kind", ObjectiveKind)
def test_a_kind_stands_for_its_defaults_and_says_what_it_divides_by(kind: ObjectiveKind):
    config, declaration = of_kind(kind), OBJECTIVES[kind]
    for option, value in declaration.defaults.items():
        assert getattr(config, option) == value
    assert declaration.decides <= set(declaration.defaults)
    assert all((declaration.sentence, declaration.source, declaration.formula, declaration.denominators))
    assert set(LOSS_OPTIONS) | set(ADVANTAGE_OPTIONS) <= set(ObjectiveConfig.model_fields)


@pytest.mark.parametrize("kind", ObjectiveKind)
def test_a_resolved_objective_reads_back_as_itself(kind: ObjectiveKind):
    config = of_kind(kind, kl_coefficient=0.1)
    assert ObjectiveConfig.model_validate(config.model_dump(exclude_unset=True)) == config


def test_the_default_is_what_it_was():
    config = ObjectiveConfig()
    assert (config.kind, config.advantage, config.clip_low, config.clip_high) == ("grpo", "grpo", 0.2, 0.28)
    assert (config.aggregation, config.correction, config.whiten) == ("token_mean", "token_tis", False)


def test_options_can_be_set_over_a_kinds_defaults():
    config = of_kind(ObjectiveKind.DAPO, dual_clip=None, filter_zero_variance=False, clip_high=0.2)
    assert (config.dual_clip, config.filter_zero_variance, config.clip_high) == (None, False, 0.2)
    assert of_kind(ObjectiveKind.GSPO, correction=Correction.GEOMETRIC_RS).correction is Correction.GEOMETRIC_RS


SPECIAL = {
    "clip_low": 0.1,
    "clip_high": 0.1,
    "dual_clip": 3.0,
    "proximal": "decoupled",
    "ratio_penalty": 0.1,
    "advantage": "rloo",
    "gamma": 0.9,
    "gae_lambda": 0.9,
    "value_clip": 0.1,
}


@pytest.mark.parametrize(("kind", "option"), list(itertools.product(ObjectiveKind, SPECIAL)))
def test_an_option_that_a_kind_has_no_use_for_is_refused(kind: ObjectiveKind, option: str):
    declaration = OBJECTIVES[kind]
    used = (
        declaration.loss in LOSS_OPTIONS[option]
        if option in LOSS_OPTIONS
        else declaration.advantages in ADVANTAGE_OPTIONS[option]
    )
    if used and declaration.defaults.get(option) == SPECIAL[option]:
        return
    if used and option not in declaration.decides:
        of_kind(kind, **{option: SPECIAL[option]})
        return
    with pytest.raises(ValidationError, match=r"changes nothing with kind|is decided by kind"):
        of_kind(kind, **{option: SPECIAL[option]})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "dr_grpo"}, "constant_length"),
        ({"kind": "dapo"}, "overlong_limit .usually"),
        ({"overlong_limit": 8}, "set both or neither"),
        ({"overlong_limit": 8, "overlong_buffer": 9}, "at most"),
        ({"kind": "gspo", "aggregation": "token_mean"}, "decided by"),
        ({"kind": "gspo", "correction": "token_tis"}, "one ratio for a whole trajectory"),
        ({"kind": "dppo", "correction": "token_tis"}, "twice"),
        ({"kind": "rloo", "advantage": "grpo"}, "decided by"),
        ({"correction": "k3_rs"}, "set correction_high"),
        ({"correction": "kpop", "correction_high": 0.1, "correction_low": 0.05}, "changes nothing"),
        ({"kl_placement": "reward"}, "kl_coefficient = 0"),
        ({"kl_coefficient": 0.1, "kl_placement": "reward", "kl_estimator": "k2"}, "biased"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "gradient 0 in expectation"),
    ],
)
def test_combinations_that_cannot_be_meant_are_refused(options: dict[str, Any], says: str):
    with pytest.raises(ValidationError, match=says):
        ObjectiveConfig(**options)


def test_what_a_kind_decides_may_be_said():
    config = of_kind(ObjectiveKind.GSPO, aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN)
    assert config.aggregation is Aggregation.SEQ_MEAN_TOKEN_MEAN
    assert of_kind(ObjectiveKind.RLOO, advantage=Advantage.RLOO).advantage is Advantage.RLOO


def test_the_estimator_of_a_penalty_is_the_one_that_is_right_where_it_is_placed():
    assert ObjectiveConfig(kl_coefficient=0.1).kl_estimator is KlEstimator.K2
    assert ObjectiveConfig.model_validate({"kl_coefficient": 0.1, "kl_placement": "reward"}).kl_estimator == "k1"


@pytest.mark.parametrize("kind", [kind for kind, made in OBJECTIVES.items() if RecordField.GROUP in made.needs])
def test_a_comparison_needs_somebody_to_compare_with(kind: ObjectiveKind):
    with pytest.raises(ConfigError, match="nobody to compare with; raise it to 2 or more"):
        run_of({"kind": kind.value, **NEEDED.get(kind, {})}, rollout={"group_size": 1})


def test_returns_need_no_group():
    assert run_of({"kind": "reinforce_pp"}, rollout={"group_size": 1}).objective.kind is ObjectiveKind.REINFORCE_PP


def test_a_loss_without_a_ratio_takes_one_step_on_a_batch():
    with pytest.raises(ConfigError, match=r"trainer\.steps_on_a_batch = 1"):
        run_of({"kind": "rloo"}, trainer={"steps_on_a_batch": 2})


def test_values_need_a_critic_and_a_critic_needs_values():
    with pytest.raises(ConfigError, match=r"add \[trainer\.critic\]"):
        run_of({"kind": "ppo"})
    with pytest.raises(ConfigError, match=r"trainer\.critic has no use"):
        run_of({"kind": "grpo"}, trainer={"critic": {}})
    assert run_of({"kind": "ppo"}, trainer={"critic": {}}).trainer.critic is not None
