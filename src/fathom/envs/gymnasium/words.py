"""Observations in words, and actions from words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, cast

import msgspec
import numpy as np

from fathom.envs.gymnasium.world import DrawnWorld, SpacedWorld, World

_INTEGER = re.compile(r"(?<![\w.])-?\d+(?![\w]|\.\d)", re.ASCII)
_RESET = re.compile(r"\x1b\[0?m")
_COLOUR = re.compile(r"\x1b\[[\d;]+m")


class ObservationForm(StrEnum):
    """How the model is told of an observation."""

    TEXT = "text"
    """It is text."""
    JSON = "json"
    """As JSON: numbers, arrays, and what is made of them."""
    DRAWING = "drawing"
    """By what the world draws with `render_mode = "ansi"`; what is coloured there stands in brackets."""


class ActionForm(StrEnum):
    """How the model acts."""

    TEXT = "text"
    """Its answer is the action, without white space around it."""
    INTEGER = "integer"
    """The last whole number of its answer, if the world's action space has it."""
    NAME = "name"
    """The one of `action_names` that occurs last in its answer; the action is its place among them, from 0."""


def describe_observation(form: ObservationForm, observation: Any, world: World) -> str:
    """The text of an observation. Raises TypeError, EncodeError: it has no such form."""
    match form:
        case ObservationForm.TEXT:
            shown = observation
        case ObservationForm.JSON:
            shown = msgspec.json.encode(observation, enc_hook=_plain).decode()
        case ObservationForm.DRAWING:
            shown = cast(DrawnWorld, world).render()
    if not isinstance(shown, str):
        raise TypeError(f"observation = {form.value!r} needs text, and the world gave a {type(shown).__name__}")
    return _COLOUR.sub("[", _RESET.sub("]", shown)) if form is ObservationForm.DRAWING else shown


def read_action(form: ActionForm, answer: str, names: Sequence[str], world: World) -> Any:
    """The action in an answer. None: there is none."""
    match form:
        case ActionForm.TEXT:
            return answer.strip()
        case ActionForm.INTEGER:
            numbers = _INTEGER.findall(answer)
            action = int(numbers[-1]) if numbers and len(numbers[-1]) < 19 else None
            return action if action is not None and cast(SpacedWorld, world).action_space.contains(action) else None
        case ActionForm.NAME:
            by_length = sorted(range(len(names)), key=lambda place: len(names[place]), reverse=True)
            written = "|".join(f"({re.escape(names[place])})" for place in by_length)
            found = list(re.finditer(rf"(?<!\w)(?:{written})(?!\w)", answer, re.IGNORECASE))
            place = found[-1].lastindex if found else None
            return by_length[place - 1] if place else None


def no_action(form: ActionForm, names: Sequence[str]) -> str:
    """What the model is told when there was none."""
    wanted = f"one of: {', '.join(names)}" if form is ActionForm.NAME else "a number that is an action"
    return f"There is no action in your answer. Answer with {wanted}."


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no form in JSON; use another `observation`")
