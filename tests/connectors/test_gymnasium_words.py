"""Actions are read from words, and observations put into words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.envs.gymnasium.words import ActionForm, ObservationForm, describe_observation, read_action


class Numbers:
    """A world with the actions 0 to 4."""

    class Upto4:
        def contains(self, x):
            return 0 <= x < 5

    action_space = Upto4()

    def __init__(self, drawing=""):
        self.drawing = drawing

    def render(self):
        return self.drawing


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("3", 3),
        ("first 1, then 2.", 2),
        ("I choose (4)!", 4),
        ("-1", None),
        ("7", None),
        ("2.5", None),
        ("x3", None),
        ("3rd", None),
        ("9" * 5000, None),
        ("\u0663", None),
        ("", None),
    ],
)
def test_the_last_whole_number_is_the_action(answer: str, action: int | None) -> None:
    assert read_action(ActionForm.INTEGER, answer, (), Numbers()) == action


@given(st.lists(st.integers(0, 4), min_size=1), st.sampled_from([" ", ", ", "\n", " and then "]))
def test_whatever_is_said_before_the_last_one_counts(numbers: list[int], between: str) -> None:
    names = ["left", "far left", "down", "up", "U-turn"]
    assert read_action(ActionForm.INTEGER, between.join(map(str, numbers)), (), Numbers()) == numbers[-1]
    said = between.join(names[number].upper() for number in numbers)
    assert read_action(ActionForm.NAME, said, names, Numbers()) == numbers[-1]


def test_names_are_whole_words() -> None:
    assert read_action(ActionForm.NAME, "upside down", ["up", "down"], Numbers()) == 1
    assert read_action(ActionForm.NAME, "upside", ["up", "down"], Numbers()) is None
    assert read_action(ActionForm.NAME, "\u017fouth", ["north", "south"], Numbers()) == 1, "a long s is one of case s"
    assert read_action(ActionForm.TEXT, "  go on \n", (), Numbers()) == "go on"


def test_observations() -> None:
    seen = {"at": np.array([1, 2], np.int8), "speed": np.float32(0.5), "where": ("a", 1)}
    assert describe_observation(ObservationForm.JSON, seen, Numbers()) == '{"at":[1,2],"speed":0.5,"where":["a",1]}'
    assert describe_observation(ObservationForm.TEXT, "a door", Numbers()) == "a door"
    drawing = Numbers("S\x1b[41mF\x1b[0mG\x1b[1;32m!\x1b[m")
    assert describe_observation(ObservationForm.DRAWING, 0, drawing) == "S[F]G[!]"
    with pytest.raises(TypeError, match="observation = 'text' needs text"):
        describe_observation(ObservationForm.TEXT, 3, Numbers())
    with pytest.raises(TypeError, match="object has no form in JSON"):
        describe_observation(ObservationForm.JSON, object(), Numbers())
