"""Memory that versions are written into: blocks, what of it is registered, what is remembered for the next one."""

import torch
from peers import blank, landing, model, never, sending, whole

from fathom.core.ids import PolicyVersion
from fathom.model.language_model import LanguageModel
from fathom.model.tiny import make_tiny
from fathom.rollout.engines.embedded.server.weight_sets import WeightSets
from fathom.sync.digest import build_manifest, digest
from fathom.sync.held import host_room, room_like
from fathom.sync.transports.p2p.fabrics.fabric import (
    JOINED_BYTES,
    Region,
    Write,
    joined_regions,
    joined_writes,
    overlap,
)
from fathom.sync.transports.p2p.held import region
from fathom.sync.transports.p2p.layouts import parallel
from fathom.sync.transports.p2p.plan import Holding
from fathom.text.characters import save_character_tokenizer


def version(number: int = 0):
    tensors = model(number)
    return build_manifest(number, 1, None, tensors), tensors


def test_room_is_one_block_of_zeros_in_the_order_of_names_and_every_tensor_its_own():
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in model().items()}
    room = host_room(forms)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in room.items()} == forms
    assert not any(tensor.any() for tensor in room.values())
    filled = [room[name] for name in sorted(room) if room[name].numel()]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in filled)
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in filled]
    assert all(0 <= after.data_ptr() - end < 64 for end, after in zip(ends, filled[1:], strict=False))
    assert len({tensor.untyped_storage().data_ptr() for tensor in filled}) == len(filled), "or a model refuses them"


def test_a_model_computes_with_room_and_names_its_weights_as_before(tmp_path):
    save_character_tokenizer(tmp_path)
    make_tiny("arithmetic", 0, tmp_path)
    own = LanguageModel.load(tmp_path, torch.bfloat16, "cpu")
    before = digest(own.weights())
    room = room_like(own.weights())
    for name, tensor in own.weights().items():
        room[name].copy_(tensor)
    own.use(room)
    own.use(room)
    assert digest(own.weights()) == before


def test_touching_memory_is_one_region_and_touching_writes_are_one():
    assert joined_regions([Region(20, 5), Region(0, 10), Region(10, 4), Region(14, 6)]) == (Region(0, 25),)
    assert joined_regions([Region(0, 10), Region(11, 4)]) == (Region(0, 10), Region(11, 4))
    assert joined_writes([Write(0, 100, 4), Write(4, 104, 4), Write(8, 109, 4), Write(13, 113, 4)]) == [
        Write(0, 100, 8),
        Write(8, 109, 4),
        Write(13, 113, 4),
    ]
    half = Write(0, 0, JOINED_BYTES // 2)
    rest = [half, Write(half.size_bytes, half.size_bytes, half.size_bytes), Write(JOINED_BYTES, JOINED_BYTES, 1)]
    assert joined_writes(rest) == [Write(0, 0, JOINED_BYTES), rest[-1]]
    assert overlap([Region(0, 10), Region(30, 5)], [Region(9, 1)])
    assert overlap([Region(9, 1)], [Region(0, 100)])
    assert not overlap([Region(0, 10), Region(30, 5)], [Region(10, 20), Region(35, 1)])


def test_what_touches_in_an_engine_is_registered_together():
    tensors = {f"layer.{number}": torch.randn(16, 16) for number in range(4)}
    manifest = build_manifest(0, 1, None, tensors)
    with sending() as side, landing() as (rank, opened):
        into = room_like(tensors)
        rank.receive(side.send(manifest, tensors), manifest, whole(into), never)
        assert digest(into) == manifest.version.digest
        assert opened[0].registered == {Region(into["layer.0"].data_ptr(), manifest.size_bytes)}


def test_the_same_memory_under_other_names_gets_what_those_names_say():
    with sending() as side, landing() as (rank, opened):
        into = blank()
        for number in range(4):
            manifest, tensors = version(number)
            if number % 2:
                into = {**into, "expert.0": into["expert.1"], "expert.1": into["expert.0"]}
            rank.receive(side.send(manifest, tensors), manifest, whole(into), never)
            assert digest(into) == manifest.version.digest
        assert len(opened) == 1


def test_a_part_of_what_was_registered_before_is_registered_anew():
    manifest, tensors = version()
    with sending() as side, landing() as (rank, opened):
        source, into = side.send(manifest, tensors), whole(blank())
        rank.receive(source, manifest, into, never)
        part = {name: into[name] for name in ("q", "embed")}
        into["q"].tensor.zero_()
        assert rank.receive(source, manifest, part, never) == sum(each.tensor.nbytes for each in part.values())
        assert torch.equal(into["q"].tensor, tensors["q"])
        assert opened[0].registered == {region(each.tensor) for each in part.values()}


def test_sources_that_hold_other_slices_than_before_are_asked_for_those():
    shapes = {name: tuple(tensor.shape) for name, tensor in model().items()}
    halves: tuple[Holding, ...] = parallel(shapes, 2, {"q": 0, "embed": 0})
    thirds: tuple[Holding, ...] = parallel(shapes, 3, {"q": 0, "embed": 0})
    into = blank()
    with landing() as (rank, _), sending() as whole_side, sending(halves) as by_two, sending(thirds) as by_three:
        for number, side in enumerate((whole_side, by_two, by_three, by_two, whole_side)):
            manifest, tensors = version(number)
            assert rank.receive(side.send(manifest, tensors), manifest, whole(into), never) == manifest.size_bytes
            assert digest(into) == manifest.version.digest


def test_the_memory_a_model_was_loaded_into_is_let_go_at_the_first_commit():
    own = torch.ones(4)
    sets = WeightSets({"w": own})
    places: list[int] = []
    for number in range(4):
        weights = sets.take_staging()
        weights.version = PolicyVersion(incarnation=1, number=number, digest=str(number))
        sets.staged = weights
        sets.commit()
        places.append(sets.live.tensors["w"].data_ptr())
    assert own.data_ptr() not in places
    assert places[:2] == places[2:], "two sets, used in turn"
    assert len(set(places)) == 2
