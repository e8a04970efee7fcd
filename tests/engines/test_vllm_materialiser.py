"""Whole versions made on the host for a server that reads nothing else. Needs no vLLM."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fathom.core.errors import PayloadError
from fathom.core.ids import EngineId
from fathom.core.manifest import DiskSource, Manifest, SharedMemorySource
from fathom.rollout.engines.vllm.materialiser import Materialiser
from fathom.sync.digest import build_manifest, digest
from fathom.sync.transports.disk import DiskTransport
from fathom.sync.transports.reception import Reception
from fathom.sync.transports.shared import read_shared


@pytest.fixture
def materialiser(tmp_path: Path) -> Iterator[Materialiser]:
    made = Materialiser(EngineId("v0"), tmp_path)
    yield made
    made.close()


def version(number: int) -> tuple[Manifest, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(number)
    tensors = {"embed": torch.randn(5, 3, generator=generator).bfloat16(), "norm": torch.randn(7, generator=generator)}
    return build_manifest(number, 1, None, tensors), tensors


def written(tmp_path: Path, number: int) -> tuple[Manifest, DiskSource]:
    manifest, tensors = version(number)
    transport = DiskTransport(tmp_path)
    transport.hold(manifest, tensors)
    return manifest, transport.offer(manifest.version, ())


def what_a_server_reads(manifest: Manifest, source: SharedMemorySource) -> str:
    _, into = version(99)
    read_shared(source, Reception(engine=EngineId("v0"), manifest=manifest, into=into, serving=None))
    return digest(into)


def test_a_server_reads_what_was_made_and_files_are_used_in_turn(tmp_path: Path, materialiser: Materialiser) -> None:
    async def run() -> None:
        paths: list[str] = []
        for number in range(6):
            manifest, source = written(tmp_path, number)
            made, moved_bytes = await materialiser.make(manifest, source)
            assert what_a_server_reads(manifest, made) == manifest.version.digest
            assert moved_bytes == manifest.size_bytes
            paths.append(made.path)
        assert len(set(paths)) == 2
        assert all(one != other for one, other in pairwise(paths))

    asyncio.run(run())


def test_what_was_made_is_not_made_again(tmp_path: Path, materialiser: Materialiser) -> None:
    async def run() -> None:
        manifest, source = written(tmp_path, 1)
        first, _ = await materialiser.make(manifest, source)
        Path(source.path).unlink()
        assert await materialiser.make(manifest, source) == (first, 0)
        materialiser.forget()
        with pytest.raises(PayloadError):
            await materialiser.make(manifest, source)

    asyncio.run(run())


def test_after_a_failure_what_was_made_before_is_whole(tmp_path: Path, materialiser: Materialiser) -> None:
    async def run() -> None:
        manifest, source = written(tmp_path, 1)
        first, _ = await materialiser.make(manifest, source)
        other, _ = version(2)
        for _ in range(3):
            with pytest.raises(PayloadError):
                await materialiser.make(other, DiskSource(path=str(tmp_path / "missing")))
        assert what_a_server_reads(manifest, first) == manifest.version.digest

    asyncio.run(run())


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    async def run() -> None:
        materialiser = Materialiser(EngineId("v0"), tmp_path)
        made, _ = await materialiser.make(*written(tmp_path, 1))
        assert Path(made.path).exists()
        materialiser.close()
        assert not Path(made.path).exists()

    asyncio.run(run())
