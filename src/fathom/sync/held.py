"""A whole version in memory, and what a version must look like to fit a model's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fathom.core.adapter import AdapterIdentity, why_another
from fathom.core.errors import PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest
from fathom.sync.digest import dtype_name, few
from fathom.sync.quantise.formats import check_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A whole version in an engine's memory."""

    version: PolicyVersion
    """Which one."""
    tensors: Mapping[str, Tensor]
    """Its tensors. They do not change while a version is received."""


def check_adapter(manifest: Manifest, adapter: AdapterIdentity | None) -> None:
    """Raise `PayloadError` unless the version is of the adapter that is computed with, None being the whole model."""
    if why := why_another(adapter, manifest.adapter):
        raise PayloadError(f"{manifest.version.name} is not for this engine: {why}")


def check_fit(manifest: Manifest, into: Mapping[str, Tensor]) -> None:
    """Raise `PayloadError` unless `into` has the manifest's names, shapes and element types; see `check_scales`."""
    entries = {entry.name: entry for entry in manifest.tensors}
    if len(entries) < len(manifest.tensors):
        names = [entry.name for entry in manifest.tensors]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise PayloadError(f"{manifest.version.name} has two tensors of the same name: {few(twice)}")
    promised = entries.keys()
    missing, unknown = sorted(into.keys() - promised), sorted(promised - into.keys())
    if missing or unknown:
        raise PayloadError(
            f"{manifest.version.name} does not fit the engine's model: without a value {few(missing)}, "
            f"without a place {few(unknown)}; publish the same model, tied names resolved to one"
        )
    for entry in manifest.tensors:
        tensor = into[entry.name]
        form, place = (entry.dtype, entry.shape), (dtype_name(entry.name, tensor), tuple(tensor.shape))
        if form != place:
            raise PayloadError(f"tensor {entry.name!r} is {form} in {manifest.version.name}, {place} in the engine")
        if not tensor.is_contiguous():
            raise PayloadError(f"tensor {entry.name!r} is not contiguous in the engine; stage into contiguous memory")
    check_scales(entries)
