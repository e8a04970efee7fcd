"""Formats of tensors: what must agree within a manifest, and between a manifest and an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fathom.core.errors import PayloadError
from fathom.core.manifest import Manifest, TensorEntry, TensorFormat


def check_scales(entries: Mapping[str, TensorEntry]) -> None:
    """Raise `PayloadError` unless each format's scales are there, plain, its own, and called after its tensor."""
    owners: dict[str, str] = {}
    for name, entry in entries.items():
        for scale in entry.format.scales if entry.format else ():
            if scale not in entries:
                raise PayloadError(
                    f"tensor {name!r} has its scales in {scale!r}, which is missing; publish it beside it"
                )
            if not scale.startswith(name) or scale == name:
                raise PayloadError(f"tensor {name!r} has its scales in {scale!r}, which by its name belongs to another")
            if owners.setdefault(scale, name) != name:
                raise PayloadError(f"tensors {owners[scale]!r} and {name!r} both have their scales in {scale!r}")
            if entries[scale].format is not None:
                raise PayloadError(f"tensor {scale!r} holds the scales of {name!r} and is coded itself; leave it plain")


def check_origin(cast: Iterable[TensorEntry], published: Iterable[TensorEntry]) -> None:
    """Raise `PayloadError` unless a quantiser can have made `published` of `cast`.

    Each tensor goes out under its name, coded or as it was, and nothing else does but their scales.
    """
    found = {entry.name: entry for entry in published}
    scales = {scale for entry in found.values() if entry.format for scale in entry.format.scales}
    before = {entry.name: entry for entry in cast}
    for name, entry in before.items():
        if name not in found:
            raise PayloadError(f"the quantiser lost tensor {name!r}")
        form = found[name].format
        if form is None and found[name].checksum != entry.checksum:
            raise PayloadError(f"the quantiser changed tensor {name!r} and gives no format for it")
        if form is not None and form.dtype != entry.dtype:
            raise PayloadError(f"the quantiser says that tensor {name!r} was {form.dtype}; it was {entry.dtype}")
    for name in found:
        if name not in before and name not in scales:
            raise PayloadError(f"the quantiser added {name!r}, which holds the scales of no tensor")


def check_known(manifest: Manifest, held: Mapping[str, TensorFormat]) -> None:
    """Raise `PayloadError` unless every tensor comes in the format in which the engine holds it."""
    for entry in manifest.tensors:
        expected = held.get(entry.name)
        if entry.format == expected:
            continue
        raise PayloadError(
            f"tensor {entry.name!r} comes {_said(entry.format)} in {manifest.version.name}, the engine holds it "
            f"{_said(expected)}; publish it as this engine needs it"
        )


def _said(form: TensorFormat | None) -> str:
    if form is None:
        return "without a format"
    return f"in format {form.name!r} (of {form.dtype}, scales in {list(form.scales)})"
