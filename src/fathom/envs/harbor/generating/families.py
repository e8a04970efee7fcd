"""The families of generated tasks: each draws one instance from a random source.

Names of files are single letters, numbers have at most two digits, and every instruction is built from the same few
words, so that a tiny model with a small vocabulary can read them all. Each instance is solved in two commands or more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

Files = dict[str, str]
"""Content by path, relative to the folder that commands start in."""

LETTERS = "abcdefgh"
"""Names of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One task."""

    family: str
    """Which family drew it."""
    instruction: str
    """What is asked."""
    before: Files
    """What is there."""
    after: Files
    """What has to be there in the end, and nothing else."""
    commands: tuple[str, ...]
    """One way to do it, as a person would type it, one after the other."""

    @property
    def key(self) -> str:
        """Two instances with the same key are the same task."""
        return f"{self.instruction}\n{sorted(self.before.items())}"


def _names(random: Random, count: int) -> list[str]:
    return random.sample(LETTERS, count)


def _numbers(random: Random, count: int) -> list[int]:
    return random.sample(range(1, 100), count)


def _lines(values: list[int]) -> str:
    return "".join(f"{value}\n" for value in values)


def write_number(random: Random) -> Instance:
    """Make a file that holds a number."""
    (name, other), (number, old) = _names(random, 2), _numbers(random, 2)
    before = {other: f"{old}\n"}
    return Instance(
        family="write",
        instruction=f"Write {number} to {name}.",
        before=before,
        after=before | {name: f"{number}\n"},
        commands=(f"echo {number} > {name}", f"cat {name}"),
    )


def append_number(random: Random) -> Instance:
    """Put a line behind those that are there."""
    (name,), (number, *old) = _names(random, 1), _numbers(random, random.randint(2, 4))
    before = {name: _lines(old)}
    return Instance(
        family="append",
        instruction=f"Append {number} to {name}.",
        before=before,
        after={name: _lines([*old, number])},
        commands=(f"echo {number} >> {name}", f"cat {name}"),
    )


def count_lines(random: Random) -> Instance:
    """Count lines; write the count."""
    (source, target), count = _names(random, 2), random.randint(2, 9)
    before = {source: _lines(_numbers(random, count))}
    return Instance(
        family="count",
        instruction=f"Count the lines of {source}. Write the count to {target}.",
        before=before,
        after=before | {target: f"{count}\n"},
        commands=(f"wc -l < {source}", f"echo {count} > {target}"),
    )


def add_numbers(random: Random) -> Instance:
    """Add two numbers out of a file."""
    (source, target), (left, right) = _names(random, 2), _numbers(random, 2)
    before = {source: _lines([left, right])}
    return Instance(
        family="add",
        instruction=f"Add the numbers in {source}. Write the sum to {target}.",
        before=before,
        after=before | {target: f"{left + right}\n"},
        commands=(f"cat {source}", f"echo $(({left}+{right})) > {target}"),
    )


def largest_number(random: Random) -> Instance:
    """Find the largest line."""
    (source, target), numbers = _names(random, 2), _numbers(random, random.randint(3, 6))
    before = {source: _lines(numbers)}
    return Instance(
        family="largest",
        instruction=f"Find the largest number in {source}. Write it to {target}.",
        before=before,
        after=before | {target: f"{max(numbers)}\n"},
        commands=(f"sort -n {source} | tail -n 1", f"echo {max(numbers)} > {target}"),
    )


def replace_number(random: Random) -> Instance:
    """Change one line."""
    (name,), (new, *numbers) = _names(random, 1), _numbers(random, random.randint(3, 5))
    old = random.choice(numbers)
    return Instance(
        family="replace",
        instruction=f"Replace {old} by {new} in {name}.",
        before={name: _lines(numbers)},
        after={name: _lines([new if value == old else value for value in numbers])},
        commands=(f"sed -i s/^{old}$/{new}/ {name}", f"cat {name}"),
    )


def rename_file(random: Random) -> Instance:
    """Rename one of two files."""
    (old, new, other), (one, two) = _names(random, 3), _numbers(random, 2)
    return Instance(
        family="rename",
        instruction=f"Rename {old} to {new}.",
        before={old: f"{one}\n", other: f"{two}\n"},
        after={new: f"{one}\n", other: f"{two}\n"},
        commands=(f"mv {old} {new}", "ls"),
    )


def move_file(random: Random) -> Instance:
    """Move a file into a new folder."""
    (name, folder, other), (one, two) = _names(random, 3), _numbers(random, 2)
    return Instance(
        family="move",
        instruction=f"Make the folder {folder}. Move {name} to {folder}.",
        before={name: f"{one}\n", other: f"{two}\n"},
        after={f"{folder}/{name}": f"{one}\n", other: f"{two}\n"},
        commands=(f"mkdir {folder}", f"mv {name} {folder}", f"ls {folder}"),
    )


def find_file(random: Random) -> Instance:
    """Find the file that holds a number."""
    *names, target = _names(random, 4)
    numbers = _numbers(random, 3)
    at = random.randrange(3)
    before = {name: f"{number}\n" for name, number in zip(names, numbers, strict=True)}
    return Instance(
        family="find",
        instruction=f"Find the file with {numbers[at]}. Write the name to {target}.",
        before=before,
        after=before | {target: f"{names[at]}\n"},
        commands=(f"grep -lx {numbers[at]} *", f"echo {names[at]} > {target}"),
    )


def remove_file(random: Random) -> Instance:
    """Remove the file that holds a number."""
    names, numbers = _names(random, 3), _numbers(random, 3)
    at = random.randrange(3)
    before = {name: f"{number}\n" for name, number in zip(names, numbers, strict=True)}
    return Instance(
        family="remove",
        instruction=f"Remove the file with {numbers[at]}.",
        before=before,
        after={name: text for name, text in before.items() if name != names[at]},
        commands=(f"grep -lx {numbers[at]} *", f"rm {names[at]}"),
    )


Family = Callable[[Random], Instance]
"""Draws an instance."""
FAMILIES: dict[str, Family] = {
    "write": write_number,
    "append": append_number,
    "count": count_lines,
    "add": add_numbers,
    "largest": largest_number,
    "replace": replace_number,
    "rename": rename_file,
    "move": move_file,
    "find": find_file,
    "remove": remove_file,
}
"""All of them, by the name that their instances bear."""
