"""From a TOML file and `key=value` overrides to a validated tree; errors name the option and the nearest right one."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from fathom.config.run import RunConfig
from fathom.core.errors import ConfigError

R = TypeVar("R", bound=BaseModel)

TABLE_KEY = ".NAME"
"""Stands in names of options for a name that a person chooses."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and validate.

    Raises:
        ConfigError: the file is missing, is not TOML, or describes no valid run. The message has one line per fault.
    """
    return parse_config(read_tree(path, overrides), str(path))


def read_tree(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Plain values of a TOML file, with `key=value` overrides in their places. Raises ConfigError."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}; see recipes/ for examples") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give the TOML file in it") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        apply_override(tree, override)
    return tree


def parse_config(tree: Mapping[str, Any], origin: str) -> RunConfig:
    """Validate a tree of plain values. `origin` names it in errors. Raises ConfigError."""
    if "data" in tree and "task" not in tree:
        raise ConfigError(f"{origin} has [data] and no [task]: it is a run for fathom sft or dpo, not for fathom train")
    return parse_root(RunConfig, tree, origin)


def parse_root(root: type[R], tree: Mapping[str, Any], origin: str) -> R:
    """The same for a run of another kind. Raises ConfigError."""
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(fault, root) for fault in error.errors()]
        raise ConfigError(f"{origin}: " + "\n".join(lines)) from None


def parse_section(section: type[BaseModel], values: Mapping[str, Any], origin: str) -> Any:
    """Validate the options that a component owns (a task's). Raises ConfigError."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        lines = [_explain(fault, section, origin) for fault in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def option_names(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Dotted names of all options, in the order of the tree."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        nested = nested_section(field.annotation)
        path = f"{prefix}{name}{TABLE_KEY if is_table(field.annotation) else ''}"
        names += option_names(nested, f"{path}.") if nested else [f"{prefix}{name}"]
    return names


def is_table(annotation: Any) -> bool:
    """Whether a field holds sections by names that a person chooses."""
    return get_origin(annotation) is dict and nested_section(annotation) is not None


def nested_section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, alone or by names. None: it is an option."""
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set what `key=value` says in a tree of plain values. Raises ConfigError when it says nothing."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form key=value, e.g. trainer.steps=50")
    *parents, leaf = key.strip().split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {parent} is not a section")
    node[leaf] = _value(text.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(fault: Any, section: type[BaseModel] = RunConfig, origin: str = "") -> str:
    path = [str(part) for part in fault["loc"]]
    name = ".".join([origin, *path] if origin else path)
    if fault["type"] == "extra_forbidden":
        known = [f"{origin}.{option}" if origin else option for option in option_names(section)]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6) or [
            option for option in known if difflib.SequenceMatcher(None, option.split(".")[-1], path[-1]).ratio() > 0.75
        ]
        return f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else "; see docs/reference/options.md")
    if fault["type"] == "missing":
        return f"option {name} is missing"
    message = fault["msg"].removeprefix("Value error, ")
    given = fault["input"]
    shown = f" (got {json.dumps(given, default=str)})" if not isinstance(given, (dict, BaseModel)) else ""
    return f"{name}: {message}{shown}" if name else message
