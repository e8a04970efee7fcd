"""A world with Gymnasium's API and no package behind it: guess a number, in words."""

from __future__ import annotations

import random
from typing import Any


class GuessingWorld:
    """-0.25 for a wrong guess, 1 for the right one. Breaks when it is told to."""

    def __init__(self, highest: int = 9, most: int = 3) -> None:
        self.highest = highest
        self.most = most
        self.secret = -1
        self.guesses = 0
        self.closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        if self.highest < 0:
            raise ValueError("there is no such number")
        self.secret = random.Random(seed).randint(0, self.highest)
        return f"Guess a number from 0 to {self.highest}.", {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == "break":
            raise RuntimeError("broken")
        if action == "mumble":
            return 7, 0.0, False, False, {}
        self.guesses += 1
        if action == str(self.secret):
            return "right", 1.0, True, self.guesses >= self.most, {}
        return f"{action} is wrong", -0.25, False, self.guesses >= self.most, {}

    def close(self) -> None:
        self.closed = True


def secret_of(seed: int) -> int:
    world = GuessingWorld()
    world.reset(seed=seed)
    return world.secret
