"""Versions that a run's chain still holds: which there are, and any of them as a Hugging Face folder, to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from fathom.core.errors import ConfigError, PayloadError
from fathom.core.ids import PolicyVersion
from fathom.evidence.runs import is_running
from fathom.evidence.versions import RecordedVersion, recorded_versions
from fathom.ledger.reader import LedgerReader
from fathom.run.history.folder import RunFolder
from fathom.sync.chain.leases import Lease
from fathom.sync.chain.links import Link
from fathom.sync.chain.reader import ChainReader
from fathom.sync.chain.store import Store
from fathom.sync.follow.model_files import model_files
from fathom.sync.follow.version_folder import blank, write_version

_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """A version that can be rebuilt."""

    name: str
    """Short text form, e.g. `v12@1`."""
    incarnation: int
    """Incarnation that made it."""
    number: int
    """Optimizer steps behind it."""
    behind: int
    """Steps by which the newest is ahead of it."""
    kinds: tuple[str, ...]
    """How it lies in the chain: `anchor`, `delta` or both."""
    size_bytes: int
    """Bytes of that."""
    digest: str
    """Root digest (hex)."""
    recorded_s: float
    """Wall-clock time at which the ledger last named it."""


def stored_versions(run: Path) -> tuple[StoredVersion, ...]:
    """The versions of a run that can be rebuilt, oldest first. Those that a resume undid are left out.

    Raises:
        ConfigError: the run keeps no chain.
        LedgerError | PayloadError: ledger or chain cannot be read.
    """
    links, recorded = ChainReader(chain_of(run)).links(), _recorded(run)
    standing = _standing(_whole(links), recorded)
    newest = max((version.number for version in standing), default=0)
    return tuple(
        _described(version, [link for link in links if link.version == version], newest, recorded[version.order])
        for version in sorted(standing, key=lambda version: version.order)
    )


def rebuild(run: Path, number: int, incarnation: int | None, out: Path) -> PolicyVersion:
    """Write a version of a run as a Hugging Face folder; returns which one it is.

    Every tensor is compared with its checksum, what was written with the root digest, and both with the ledger.

    Args:
        run: the run's folder; it may be going on.
        number: which version. Negative: counted from the newest, -7 is the newest less seven steps.
        incarnation: which of several of that number. None: the latest that stands.
        out: the folder to make.

    Raises:
        ConfigError: there is no such version, a resume undid it, or `out` exists.
        PayloadError: the chain is damaged, or holds something else than the ledger recorded.
        DeliveryError: `out` cannot be written.
    """
    if out.exists():
        raise ConfigError(f"{out} exists and is not overwritten; name another folder")
    store, recorded = chain_of(run), _recorded(run)
    reader = ChainReader(store)
    versions = _whole(reader.links())
    version = _chosen(versions, recorded, number, incarnation)
    link = reader.find(version.number, version.incarnation)
    _require_recorded(link, recorded[version.order])
    weights = blank(link.manifest)
    # Without a process that drops versions nothing has to be held, and the store need not be written to.
    with Lease(store, version) if is_running(run) else nullcontext():
        reader.materialise(version, weights, None)
    config = RunFolder(run).config()
    base = config.model.path or str(RunFolder(run).model.absolute())
    write_version(model_files(store), version, weights, out, link.manifest.adapter, base)
    return version


def chain_of(run: Path) -> Store:
    """The store with a run's chain. Raises `ConfigError` when the run keeps none."""
    config = RunFolder(run).config().sync.chain
    if config.budget_mb == 0:
        raise ConfigError(f"{run.name} keeps no versions (sync.chain.budget_mb = 0), so none can be rebuilt")
    return Store.of_run(run, config.store)


def _recorded(run: Path) -> Mapping[tuple[int, int], RecordedVersion]:
    with LedgerReader(RunFolder(run).ledger) as ledger:
        return recorded_versions(ledger)


def _whole(links: Sequence[Link]) -> list[PolicyVersion]:
    """Versions to which a path leads from an anchor."""
    reached: set[PolicyVersion] = set()
    for link in links:
        if link.parent is None or link.parent in reached:
            reached.add(link.version)
    return sorted(reached, key=lambda version: version.order)


def _standing(
    versions: Sequence[PolicyVersion], recorded: Mapping[tuple[int, int], RecordedVersion]
) -> list[PolicyVersion]:
    return [each for each in versions if each.order in recorded and not recorded[each.order].undone]


def _chosen(
    versions: Sequence[PolicyVersion],
    recorded: Mapping[tuple[int, int], RecordedVersion],
    number: int,
    incarnation: int | None,
) -> PolicyVersion:
    """The version that is meant. Raises `ConfigError` naming what there is."""
    standing = _standing(versions, recorded)
    newest = max((version.number for version in standing), default=0)
    wanted = number if number >= 0 else newest + number
    asked = f"v{wanted}" + (f"@{incarnation}" if incarnation is not None else "")
    asked += f" ({number} from v{newest})" if number < 0 else ""
    found = [each for each in standing if each.number == wanted and incarnation in (None, each.incarnation)]
    if found:
        return max(found, key=lambda version: version.order)
    undone = [
        each
        for each in recorded.values()
        if each.undone and each.number == wanted and incarnation in (None, each.incarnation)
    ]
    why = "was undone by a resume: the run went on from an earlier one" if undone else "cannot be rebuilt"
    raise ConfigError(f"{asked} {why}; there are {_listed(standing)}")


def _require_recorded(link: Link, recorded: RecordedVersion) -> None:
    """Raise `PayloadError` unless the chain's version is the one that the run trained and published."""
    version = link.version
    if recorded.published not in (None, version.digest):
        raise PayloadError(
            f"the chain holds a {version.name} with the digest {version.digest}, and {recorded.published} was "
            "published: this chain is not this run's"
        )
    cast = link.manifest.cast_digest or version.digest
    if recorded.cast not in (None, cast):
        raise PayloadError(
            f"the chain holds a {version.name} of the cast {cast}, and one of {recorded.cast} was published: "
            "this chain is not this run's"
        )
    if recorded.stepped not in (None, cast):
        raise PayloadError(
            f"the chain holds a {version.name} with the digest {cast}, and step {version.number} left "
            f"{recorded.stepped}: this chain is not this run's"
        )


def _described(version: PolicyVersion, links: Sequence[Link], newest: int, recorded: RecordedVersion) -> StoredVersion:
    return StoredVersion(
        name=version.name,
        incarnation=version.incarnation,
        number=version.number,
        behind=newest - version.number,
        kinds=tuple("anchor" if link.parent is None else "delta" for link in links),
        size_bytes=sum(link.size_bytes for link in links),
        digest=version.digest,
        recorded_s=recorded.at_s,
    )


def _listed(versions: Sequence[PolicyVersion]) -> str:
    """Those that there are, ranges told by their ends."""
    if not versions:
        return "none"
    names = [version.name for version in versions]
    if len(names) <= _SHOWN:
        return ", ".join(names)
    half = _SHOWN // 2
    return ", ".join([*names[:half], "...", *names[-half:]])
