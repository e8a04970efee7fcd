"""Digests: any change of name, form or byte shows, whatever the order, the device or the strides."""

import os
import threading
from itertools import pairwise

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.core.errors import PayloadError
from fathom.core.ids import PolicyVersion
from fathom.sync.digest import (
    DTYPE_NAMES,
    build_manifest,
    checksum,
    copy_bytes,
    digest,
    few,
    layout,
    root_digest,
    wrong_tensors,
)


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(5, 4, generator=generator).bfloat16(),
        "block.q": torch.randn(4, 4, generator=generator),
        "block.k": torch.randn(4, 4, generator=generator),
        "scale": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
    }


def test_the_checksum_is_blake3_of_the_bytes():
    tensor = torch.tensor([1.0, -2.0])
    assert checksum(tensor) == blake3(b"\x00\x00\x80\x3f\x00\x00\x00\xc0").hexdigest()


def test_the_root_digest_is_of_the_written_listing():
    value = torch.tensor([7], dtype=torch.uint8)
    line = f'["a","U8",[1],"{blake3(bytes([7])).hexdigest()}"]\n'
    assert digest({"a": value}) == blake3(line.encode()).hexdigest()


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES))
def test_every_element_type_is_digested_by_its_bytes(dtype):
    ones, zeros = torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
    assert checksum(ones) == checksum(ones.clone())
    assert checksum(ones) != checksum(zeros)


def test_strides_do_not_matter_but_the_logical_order_does():
    square = torch.arange(9.0).view(3, 3)
    assert checksum(square.t()) == checksum(square.t().contiguous())
    assert checksum(square.t()) != checksum(square)


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(sorted(model())))
def test_the_order_in_which_tensors_are_given_does_not_matter(order):
    tensors = model()
    assert digest({name: tensors[name] for name in order}) == digest(tensors)
    entries = {entry.name: entry for entry in layout(tensors)}
    assert root_digest(entries[name] for name in order) == digest(tensors)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_one_flipped_bit_anywhere_shows_and_is_named(data):
    tensors = model()
    manifest = build_manifest(3, 1, None, tensors)
    name = data.draw(st.sampled_from([name for name in tensors if tensors[name].numel()]))
    memory = tensors[name].view(-1).view(torch.uint8)
    memory[data.draw(st.integers(0, len(memory) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(tensors) != manifest.version.digest
    assert wrong_tensors(manifest, tensors) == (name,)


def swapped(tensors):
    tensors["block.q"], tensors["block.k"] = tensors["block.k"], tensors["block.q"]


def renamed(tensors):
    tensors["block.query"] = tensors.pop("block.q")


def transposed(tensors):
    tensors["embed"] = tensors["embed"].view(4, 5)


def recast(tensors):
    tensors["embed"] = tensors["embed"].view(torch.float16)


def dropped(tensors):
    del tensors["scale"]


def added(tensors):
    tensors["buffer"] = torch.zeros(2)


def reshaped_empty(tensors):
    tensors["empty"] = torch.zeros(3, 0)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (swapped, ("block.k", "block.q")),
        (renamed, ("block.q", "block.query")),
        (transposed, ("embed",)),
        (recast, ("embed",)),
        (dropped, ("scale",)),
        (added, ("buffer",)),
        (reshaped_empty, ("empty",)),
    ],
)
def test_a_changed_model_has_another_digest_and_the_change_is_named(change, names):
    tensors = model()
    manifest = build_manifest(3, 1, None, tensors)
    change(tensors)
    assert digest(tensors) != manifest.version.digest
    assert wrong_tensors(manifest, tensors) == names


def test_a_manifest_lays_tensors_side_by_side_at_aligned_places():
    tensors = model()
    entries = layout(tensors)
    assert [entry.name for entry in entries] == sorted(tensors)
    for entry, after in pairwise(entries):
        assert entry.offset % 64 == 0
        assert after.offset >= entry.offset + entry.size_bytes
    manifest = build_manifest(3, 2, PolicyVersion(2, 1, "d"), tensors)
    assert manifest.version == PolicyVersion(incarnation=2, number=3, digest=root_digest(entries))
    assert manifest.size_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_a_manifest_refuses_tied_names():
    head = torch.ones(4, 2)
    with pytest.raises(PayloadError, match=r"lm_head.*tied to.*embed"):
        build_manifest(0, 1, None, {"embed": head, "lm_head": head})


def test_a_manifest_refuses_nothing_and_unknown_element_types():
    with pytest.raises(PayloadError, match="no bytes"):
        build_manifest(0, 1, None, {"empty": torch.zeros(0)})
    with pytest.raises(PayloadError, match="'wave'"):
        build_manifest(0, 1, None, {"wave": torch.zeros(2, dtype=torch.complex64)})


def test_messages_list_a_few_names():
    assert few(["a", "b"]) == "['a', 'b']"
    assert few([*"abcdefg"]) == "['a', 'b', 'c', 'd', 'e'] and 2 more"


def test_bytes_are_copied_whatever_the_form_on_the_other_side():
    source = torch.randn(3, 4).bfloat16()
    into = torch.zeros(64, dtype=torch.uint8)
    copy_bytes(source, into[8:32])
    assert torch.equal(into[8:32], source.view(-1).view(torch.uint8))
    assert not into[:8].any()
    assert not into[32:].any(), "its neighbours are untouched"
    copy_bytes(torch.zeros(0), torch.zeros(0, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("source", "into", "why"),
    [
        (torch.ones(8), torch.ones(7), "32 bytes cannot be copied into 28"),
        (torch.ones(1), torch.ones(7), "4 bytes cannot be copied into 28"),
        (torch.ones(2, 3).t(), torch.ones(3, 2), "contiguous"),
        (torch.ones(3, 2), torch.ones(2, 3).t(), "contiguous"),
    ],
)
def test_bytes_are_not_copied_where_they_do_not_belong(source, into, why):
    with pytest.raises(ValueError, match=why):
        copy_bytes(source, into)


def test_copying_much_leaves_no_team_of_threads_behind():
    """Another team would make every parallel region of the process slower (`copy_bytes`)."""
    source, into = torch.ones(20_000_000, dtype=torch.uint8), torch.zeros(20_000_000, dtype=torch.uint8)
    begin, copied, end = threading.Event(), threading.Event(), threading.Event()

    def copy() -> None:
        torch.set_num_threads(2)
        begin.wait()
        copy_bytes(source, into)
        copied.set()
        end.wait()

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        before = len(os.listdir("/proc/self/task"))
        begin.set()
        copied.wait()
        assert len(os.listdir("/proc/self/task")) == before
        assert torch.equal(source, into)
    finally:
        end.set()
        thread.join()
        torch.set_num_threads(1)


def test_a_listing_that_is_known_is_taken_as_it_is():
    entries = layout(model())
    manifest = build_manifest(1, 1, None, model(), entries=entries)
    assert manifest == build_manifest(1, 1, None, model())
    with pytest.raises(PayloadError, match="list them anew"):
        build_manifest(1, 1, None, model() | {"scale": torch.zeros(2)}, entries=entries)
