"""Runs that tune, checked: their config and their samples. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from fathom.config.load import parse_root, read_tree
from fathom.config.tuning.preference import PreferenceConfig
from fathom.config.tuning.supervised import SupervisedConfig
from fathom.core.errors import ConfigError
from fathom.run.tuning.prepare import Prepared, TuningConfig, prepare_conversations, prepare_pairs
from fathom.trainer.tuning.samples import Conversation, Pair

KINDS: dict[str, type[SupervisedConfig] | type[PreferenceConfig]] = {"sft": SupervisedConfig, "dpo": PreferenceConfig}
"""Root of the config by the kind of run."""


@final
@dataclass(frozen=True, slots=True)
class SupervisedPlan:
    """A run of supervised fine-tuning."""

    config: SupervisedConfig
    """Validated options."""
    prepared: Prepared[Conversation]
    """Model and conversations."""


@final
@dataclass(frozen=True, slots=True)
class PreferencePlan:
    """A run of preference training."""

    config: PreferenceConfig
    """Validated options."""
    prepared: Prepared[Pair]
    """Model and pairs."""


TuningPlan = SupervisedPlan | PreferencePlan


def plan_of(config: TuningConfig) -> TuningPlan:
    """Read the files that a config names. Raises ConfigError when the run cannot start."""
    match config:
        case SupervisedConfig():
            return SupervisedPlan(config, prepare_conversations(config))
        case PreferenceConfig():
            return PreferencePlan(config, prepare_pairs(config))


def plan_from_toml(kind: str, path: Path, overrides: Sequence[str] = ()) -> TuningPlan:
    """A run of a kind, from a file and `key=value` overrides. Raises ConfigError."""
    return plan_of(parse_tuning({"kind": kind} | read_tree(path, overrides), str(path), kind))


def parse_tuning(tree: Mapping[str, Any], origin: str, kind: str) -> TuningConfig:
    """Validate a tree of plain values. Raises ConfigError; also when it is of another kind than asked for."""
    if "rollout" in tree or "task" in tree:
        raise ConfigError(f"{origin} has [rollout] or [task]: it is a run for fathom train, not for fathom {kind}")
    if kind not in KINDS:
        raise ConfigError(f"{origin} has kind = {kind!r}; known are {', '.join(KINDS)}")
    found = tree.get("kind", kind)
    if found != kind:
        raise ConfigError(f"{origin} has kind = {found!r}; start it with fathom {found}")
    return parse_root(KINDS[kind], tree, origin)
