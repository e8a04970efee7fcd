"""What a person who writes a config meets: the right tree, or one clear sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fathom.config.families import Correction
from fathom.config.load import load_config, option_names, parse_config
from fathom.config.run import RunConfig
from fathom.core.errors import ConfigError
from fathom.core.records.sampling import InFlightMode

SMALLEST = """
name = "x"
[model]
tiny = "arithmetic"
[task]
kind = "arithmetic"
[rollout]
max_new_tokens = 8
max_prompt_tokens = 16
[trainer]
steps = 4
groups_per_step = 2
"""


def load(tmp_path: Path, *overrides: str, text: str = SMALLEST) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_config(path, overrides)


def test_overrides_take_toml_values_and_bare_words(tmp_path: Path) -> None:
    config = load(tmp_path, "trainer.steps=6", "objective.correction=icepop", 'name="y"', "trainer.optimizer.lr=1e-3")
    assert (config.trainer.steps, config.objective.correction, config.name) == (6, Correction.ICEPOP, "y")
    assert config.trainer.optimizer.lr == 1e-3


def test_a_resolved_config_reads_back_as_itself(tmp_path: Path) -> None:
    config = load(tmp_path, "staleness.max_staleness=0")
    assert config.rollout.in_flight is InFlightMode.DRAIN
    assert parse_config(config.model_dump(mode="json", exclude_unset=True), "again") == config


@pytest.mark.parametrize("name", [name for name in option_names() if not name.endswith(("options", "top_k", "top_p"))])
def test_every_misspelt_option_is_refused_with_the_right_one(tmp_path: Path, name: str) -> None:
    misspelt = name[:-1] + ("x" if name[-1] != "x" else "y")
    value = {"model.tiny": "arithmetic"}.get(name, "1")
    with pytest.raises(ConfigError) as error:
        load(tmp_path, f"{misspelt}={value}")
    assert f"unknown option {misspelt}" in str(error.value)
    assert f"did you mean {name}" in str(error.value) or len(name) <= 5


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.steps=0"], "greater than 0"),
        (["rollout.group_size=-1"], "greater than 0"),
        (["trainer.groups_per_step=two"], "valid integer"),
        (["staleness.max_staleness=0", "trainer.steps_on_a_batch=2"], "the smallest possible value is 1"),
        (["staleness.max_staleness=1", "staleness.publish_every=4"], "the smallest possible value is 3"),
        (["staleness.max_kv_staleness=0", "staleness.publish_every=2"], "max_kv_staleness"),
        (["deterministic=true"], "needs staleness.max_staleness = 0"),
        (["staleness.max_staleness=0", "rollout.in_flight=continue"], "implies rollout.in_flight = 'drain'"),
        (["staleness.max_staleness=0", "staleness.on_stale=drop"], "changes nothing"),
        (["engine.max_running=64", "engine.step_tokens=64"], "leaves no room for prompts"),
        (["staleness.min_graded=9"], "more than rollout.group_size"),
        (["trainer.steps=5", "trainer.steps_on_a_batch=2"], "multiple"),
        (["rollout.max_in_flight=4"], "less than one group"),
        (["engine.dtype=bfloat16"], "differs from the published cast"),
        (["engine.host=0.0.0.0"], "token_env"),
        (["trainer.replay_routes=true"], "set rollout.record_routes = true"),
        (["objective.correction=none", "objective.correction_high=3"], "changes nothing"),
        (["objective.proximal=bypass"], "twice"),
        (["objective.kl_estimator=k1"], "changes nothing"),
        (["objective.aggregation=seq_mean_token_sum_norm"], "constant_length"),
        (["objective.correction_low=3"], "must be below"),
        (["evaluation.pass_at=4"], "at least as many samples"),
        (["rollout.sampling.temperature=0"], "greater than 0"),
        (["rollout.sampling.top_p=1.5"], "less than or equal to 1"),
        (["rollout.sampling.logit_bias.7=101"], "values of a logit bias"),
        (["rollout.sampling.logit_bias.x=1"], "valid integer"),
        (['rollout.stop_strings=[""]'], "match pattern"),
        (["model.path=somewhere"], "exactly one of path and tiny"),
        (["name=../up"], "name"),
        (["nonsense"], "key=value"),
        (["name.x=1"], "not a section"),
        (["objective.clip_low=nan"], "finite"),
    ],
)
def test_bad_combinations_are_refused_with_the_fix(tmp_path: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        load(tmp_path, *overrides)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path, text="name = ")
    with pytest.raises(ConfigError, match="option trainer is missing"):
        load(tmp_path, text=SMALLEST.partition("[trainer]")[0])


def test_families_are_closed(tmp_path: Path) -> None:
    wrong: Any = {"objective.advantage": "gpro", "sync.transport": "pigeon", "staleness.on_stale": "shrug"}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=name):
            load(tmp_path, f"{name}={value}")
