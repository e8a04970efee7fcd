"""Draws held-out and training instances: no instruction of a held-out one is ever trained on."""

from __future__ import annotations

from random import Random

from fathom.core.errors import ConfigError
from fathom.envs.harbor.generating.families import FAMILIES, Instance

_TRIES = 1000


def draw(seed: int, count: int, held_out: int) -> tuple[list[Instance], list[Instance]]:
    """(`count` training instances, `held_out` others), all different, from each family in turn.

    The same for the same arguments; the held-out ones, drawn first, do not depend on `count`.

    Raises:
        ConfigError: so many different ones cannot be drawn.
    """
    random, seen = Random(f"terminal tasks {seed}"), set[str]()
    held = [_another(number, random, seen, frozenset()) for number in range(held_out)]
    kept_apart = frozenset(instance.instruction for instance in held)
    return [_another(held_out + number, random, seen, kept_apart) for number in range(count)], held


def _another(number: int, random: Random, seen: set[str], not_these: frozenset[str]) -> Instance:
    family = FAMILIES[number % len(FAMILIES)]
    for _ in range(_TRIES):
        instance = family(random)
        if instance.key not in seen and instance.instruction not in not_these:
            seen.add(instance.key)
            return instance
    raise ConfigError(f"{family.__name__} has no more different tasks after {number} in all; ask for fewer")
