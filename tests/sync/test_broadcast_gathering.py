"""A state spread over trainer ranks arrives as if it had been whole, however it is cut."""

import threading
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from fathom.core.errors import DeliveryError, PayloadError
from fathom.sync.digest import build_manifest
from fathom.sync.shards import Box, Shard
from fathom.sync.transports.broadcast.bucket_source import FlatSource, layout_bytes
from fathom.sync.transports.broadcast.buckets import plan_buckets
from fathom.sync.transports.broadcast.gathering import GatheredSource, serve_shards, share_out

RANKS = 3
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool]


def form(ranks: int, timeout_s: float) -> list[ProcessGroupGloo]:
    """Trainer ranks as threads of this process."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
    formed = {}

    def join(rank: int) -> None:
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        formed[rank] = ProcessGroupGloo(PrefixStore("trainer", store.clone()), rank, ranks, options)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [formed[rank] for rank in range(ranks)]


@pytest.fixture(scope="module")
def trainer():
    return form(RANKS, 20.0)


@st.composite
def cut(draw, shape):
    """Boxes that cover a tensor, cut along one dimension after another, some of them held twice."""
    parts = [Box.whole(shape)]
    for dim in range(len(shape)):
        if draw(st.booleans()):
            at = draw(st.integers(1, max(1, shape[dim] - 1)))
            sides = [
                Box(tuple((0, s) if d != dim else bound for d, s in enumerate(shape)))
                for bound in ((0, min(at, shape[dim])), (min(at, shape[dim]), shape[dim]))
            ]
            parts = [common for part in parts for side in sides if (common := part.intersect(side))]
    return parts


@st.composite
def states(draw):
    """Tensors, and which rank holds which part of them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors, layout = {}, [[] for _ in range(RANKS)]
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
        values = torch.randint(0, 2**31, shape, generator=generator)
        tensors[name := f"t{number}"] = values.to(draw(st.sampled_from(DTYPES)))
        for part in draw(cut(shape)):
            for rank in draw(st.sets(st.integers(0, RANKS - 1), min_size=1)):
                layout[rank].append(Shard(name, part))
    return tensors, layout


@settings(max_examples=60, deadline=None)
@given(state=states(), bucket_bytes=st.sampled_from([64, 128, 1024]))
def test_gathered_buckets_are_those_of_the_whole(trainer, state, bucket_bytes):
    tensors, layout = state
    manifest = build_manifest(0, 1, None, tensors)
    mine = [{s: tensors[s.name][(..., *s.box.slices)].contiguous() for s in shards} for shards in layout]
    servers = [
        threading.Thread(target=serve_shards, args=(manifest, layout, mine[rank], trainer[rank], 5, bucket_bytes))
        for rank in range(1, RANKS)
    ]
    for server in servers:
        server.start()
    gathered = GatheredSource(manifest, layout, mine[0], trainer[0], 5, bucket_bytes, 20.0)
    whole = FlatSource(torch.zeros(layout_bytes(manifest), dtype=torch.uint8))
    whole.hold(manifest, tensors)
    previous = None
    try:
        for bucket in plan_buckets(manifest, bucket_bytes) * 2:  # a version can be had again
            got, expected = gathered.fill(bucket), whole.fill(bucket)
            for piece in bucket.pieces:
                assert torch.equal(got[bucket.place(piece)], expected[bucket.place(piece)])
            if previous is not None:
                assert torch.equal(*previous), "the bucket before was overwritten while it may be under way"
            previous = got, got.clone()
    finally:
        gathered.close()
        for server in servers:
            server.join(20)
    assert not any(server.is_alive() for server in servers)


def test_a_gap_in_the_layout_is_named():
    manifest = build_manifest(0, 1, None, {"norm": torch.ones(4), "w": torch.ones(8, 4)})
    layout = [[Shard("norm", Box(((0, 4),))), Shard("w", Box(((0, 8), (0, 2))))], [Shard("w", Box(((0, 3), (2, 4))))]]
    with pytest.raises(PayloadError, match=r"\(\(3, 8\), \(2, 4\)\) of tensor 'w' are held by no trainer rank"):
        share_out(manifest, layout)


def test_what_several_ranks_hold_is_sent_once_by_the_first():
    manifest = build_manifest(0, 1, None, {"w": torch.ones(8, 4)})
    everything = [Shard("w", Box.whole((8, 4)))]
    assert [len(shares) for shares in share_out(manifest, [everything] * 3)] == [1, 0, 0]


def test_a_trainer_rank_that_does_not_answer_is_a_delivery_error():
    root, _ = form(2, 20.0)
    manifest = build_manifest(0, 1, None, {"w": torch.ones(8)})
    layout = [[], [Shard("w", Box(((0, 8),)))]]
    source = GatheredSource(manifest, layout, {}, root, 0, 64, within_s=0.2)
    with pytest.raises(DeliveryError, match="did not send its part"):
        source.fill(plan_buckets(manifest, 64)[0])
    source.close()
