"""Which LoRA adapter a version is of: what has to be known of it to compute the same function."""

from __future__ import annotations

import math

import msgspec
from blake3 import blake3


class AdapterForm(msgspec.Struct, frozen=True, tag="adapter_form.1"):
    """An adapter apart from its numbers and from the model that it is of: `y = W x + scale * B (A x)`."""

    name: str
    """What it is called."""
    rank: int
    """Rows of A and columns of B; at least 1."""
    alpha: float
    """Numerator of the scale."""
    rslora: bool
    """The scale is `alpha / sqrt(rank)` (rank-stabilised LoRA). False: `alpha / rank`."""
    targets: tuple[str, ...]
    """Last parts of the names of the adapted matrices, in order. Empty: all that can be adapted."""

    @property
    def scale(self) -> float:
        """What the update is multiplied by (`algorithms.md` I). It is computed here and applied in
        `model/lora/low_rank.py`, and nowhere else."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class AdapterIdentity(msgspec.Struct, frozen=True, tag="adapter.1"):
    """An adapter of one base model, apart from its numbers, which the digest of a version names."""

    form: AdapterForm
    """Its form; `targets` are those that were found, never empty."""
    base: str
    """Root digest (hex) of the base model's tensors in the element type that is computed with."""

    @property
    def label(self) -> str:
        """One word for records: the name, and BLAKE3 (hex) of the whole identity."""
        return f"{self.form.name}:{blake3(msgspec.json.encode(self)).hexdigest()}"


def why_another(wanted: AdapterIdentity | None, given: AdapterIdentity | None) -> str | None:
    """What tells two identities apart, for people. None: nothing does.

    Args:
        wanted: what is computed with here. None: a whole model, without an adapter.
        given: what a version is of.
    """
    if wanted == given:
        return None
    if wanted is None or given is None:
        kinds = ("the whole model", "an adapter")
        return f"it is {kinds[given is not None]}, and {kinds[wanted is not None]} is computed with here"
    if wanted.base != given.base:
        return (
            f"it is an adapter for another base: made for {given.base}, and the base here is {wanted.base} (weights "
            "and their element type both count)"
        )
    fields = [name for name in AdapterForm.__struct_fields__ if getattr(wanted.form, name) != getattr(given.form, name)]
    told = ", ".join(f"{name} {getattr(given.form, name)} instead of {getattr(wanted.form, name)}" for name in fields)
    return f"it is another adapter: {told}"


class MergeRounding(msgspec.Struct, frozen=True, tag="merge_rounding.1"):
    """What is lost where an update is added to its matrix and the sum rounded to the matrix's element type."""

    max_abs: float
    """Largest distance of an element from the exact sum."""
    unchanged: int
    """Elements that an update other than zero left as they were."""
    updated: int
    """Elements whose update is not zero."""
