"""What is published of the trainer's cast: its manifest, and the tensors that go out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fathom.core.adapter import AdapterIdentity
from fathom.core.errors import PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest, TensorEntry
from fathom.sync.digest import build_manifest, layout, root_digest
from fathom.sync.quantise.formats import check_origin
from fathom.sync.quantise.quantiser import Quantiser


def describe(
    number: int,
    incarnation: int,
    parent: PolicyVersion | None,
    cast: Mapping[str, Tensor],
    quantiser: Quantiser | None,
    *,
    adapter: AdapterIdentity | None = None,
    entries: Sequence[TensorEntry] | None = None,
    threads: int = 1,
) -> tuple[Manifest, Mapping[str, Tensor]]:
    """Version `number` of `incarnation`: `cast` itself, or what `quantiser` makes of it.

    `adapter`: whose tensors `cast` are; None: a whole model's. `entries`: the `layout` of `cast`; None: not known yet.

    Raises:
        PayloadError: see `build_manifest`; or the quantiser cannot code a tensor, or did more than to code, or should
            code an adapter.
    """
    if quantiser is None:
        manifest = build_manifest(number, incarnation, parent, cast, adapter=adapter, entries=entries, threads=threads)
        return manifest, cast
    if adapter is not None:
        raise PayloadError("an adapter is published as it was cast; leave the quantiser out")
    before = layout(cast, threads=threads) if entries is None else entries
    coded = quantiser.apply(cast)
    manifest = build_manifest(
        number,
        incarnation,
        parent,
        coded.tensors,
        formats=coded.formats,
        cast_digest=root_digest(before),
        threads=threads,
    )
    check_origin(before, manifest.tensors)
    return manifest, coded.tensors
