"""BLAKE3 in torch operations equals the `blake3` package, for every length and however tensors are batched."""

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.sync.digest import build_manifest, checksum, digest
from fathom.sync.tree_hash import tree_hashes

CHUNK = 1024
EDGES = [0, 1, 3, 4, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 1087, 1088, 2047, 2048, 2049]
TREES = [3 * CHUNK, 4 * CHUNK + 1, 5 * CHUNK, 7 * CHUNK - 5, 8 * CHUNK, 9 * CHUNK + 64, 33 * CHUNK + 7, 300_001]


def content(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def expected(tensor: torch.Tensor) -> str:
    return blake3(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("size", EDGES + TREES)
def test_one_tensor_of_any_length(size):
    tensor = content(size)
    assert tree_hashes([tensor]) == [expected(tensor)]


@pytest.mark.parametrize("batch_chunks", [1, 7, 64])
def test_many_tensors_in_batches_of_any_size(batch_chunks):
    tensors = [content(size, seed) for seed, size in enumerate([0, 64, 1024, 1025, 2048, *TREES[:4]])]
    assert tree_hashes(tensors, batch_chunks=batch_chunks) == [expected(tensor) for tensor in tensors]


def test_something_large_crosses_batches():
    tensor = content(2_500_000)
    assert tree_hashes([tensor], batch_chunks=1000) == [expected(tensor)]


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(0, 6000), min_size=1, max_size=8), batch_chunks=st.integers(2, 12))
def test_any_list_of_lengths(sizes, batch_chunks):
    tensors = [content(size, seed) for seed, size in enumerate(sizes)]
    assert tree_hashes(tensors, batch_chunks=batch_chunks) == [expected(tensor) for tensor in tensors]


def test_no_tensors_have_no_hashes():
    assert tree_hashes([]) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_every_element_size(dtype):
    tensor = content(3000).to(torch.float32).to(dtype).view(3, 1000)
    assert tree_hashes([tensor]) == [expected(tensor)]


def test_what_is_not_contiguous_or_begins_at_an_odd_byte():
    memory = content(9000)
    tensors = [memory[1:2049], memory[3:8003], memory[:8100].view(90, 90).t(), torch.tensor(1.5)]
    assert tree_hashes(tensors) == [expected(tensor) for tensor in tensors]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_no_digest(threads):
    sizes = [70_000_000, 3_000_000, 2_000_000, 500, 0, 900_000, 900_001]
    tensors = {f"t{index}": content(size, index) for index, size in enumerate(sizes)}
    manifest = build_manifest(0, 1, None, tensors, threads=threads)
    assert [entry.checksum for entry in manifest.tensors] == [expected(tensor) for tensor in tensors.values()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_finds_the_same():
    tensors = [content(size, seed) for seed, size in enumerate([*EDGES, *TREES, 5_000_003])]
    there = [tensor.cuda() for tensor in tensors]
    assert tree_hashes(there) == tree_hashes(there, batch_chunks=5) == [expected(tensor) for tensor in tensors]
    assert [checksum(tensor) for tensor in there] == [checksum(tensor) for tensor in tensors]
    mixed = {"host": tensors[-1], "device": there[-2]}
    assert digest(mixed) == digest({"host": tensors[-1], "device": tensors[-2]})
