"""Draws held-out and training instances: no instruction of a held-out one is ever trained on."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from fathom.core.errors import ConfigError
from fathom.envs.harbor.generating.families import FAMILIES, Family, Instance

_TRIES = 1000


def draw(seed: int, count: int, held_out: int, families: Sequence[str] = ()) -> tuple[list[Instance], list[Instance]]:
    """(`count` training instances, `held_out` others), all different, from each family in turn.

    The same for the same arguments; the held-out ones, drawn first, do not depend on `count`.

    Args:
        seed: decides which.
        count: training instances.
        held_out: held-out ones.
        families: names of the families, in the order of their turns. Empty: all of them.

    Raises:
        ConfigError: so many different ones cannot be drawn, or there is no such family.
    """
    if unknown := sorted(set(families) - FAMILIES.keys()):
        raise ConfigError(f"no family {unknown[0]!r} of tasks; choose from {', '.join(FAMILIES)}")
    turns = tuple(FAMILIES[name] for name in families or FAMILIES)
    random, seen = Random(f"terminal tasks {seed}"), set[str]()
    held = [_another(turns[number % len(turns)], random, seen, frozenset()) for number in range(held_out)]
    kept_apart = frozenset(instance.instruction for instance in held)
    numbers = range(held_out, held_out + count)
    return [_another(turns[number % len(turns)], random, seen, kept_apart) for number in numbers], held


def _another(family: Family, random: Random, seen: set[str], not_these: frozenset[str]) -> Instance:
    for _ in range(_TRIES):
        instance = family(random)
        if instance.key not in seen and instance.instruction not in not_these:
            seen.add(instance.key)
            return instance
    raise ConfigError(f"{family.__name__} has no more different tasks after {len(seen)} in all; ask for fewer")
