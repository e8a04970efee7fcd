"""Versions that go out coded: engines prove what they hold of them; scales are where they belong, or are named."""

import asyncio

import msgspec
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from offers import ENGINE, hold_and_offer

from fathom.config.sync import SyncConfig
from fathom.core.errors import PayloadError
from fathom.core.ids import EngineId
from fathom.core.manifest import Manifest, TensorFormat
from fathom.core.ports.engine import ReceivesInto
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import build_manifest, checksum, digest, root_digest
from fathom.sync.faults.faulty_transport import FaultyTransport, Mishap, MishapAt
from fathom.sync.faults.scripted_clock import run_scripted
from fathom.sync.memory_receiver import MemoryReceiver
from fathom.sync.publisher import Publisher
from fathom.sync.quantise.int8_rows import INT8_ROWS, Int8Rows, decode
from fathom.sync.quantise.quantiser import Quantised
from fathom.sync.transports.inbox import Inbox
from fathom.sync.transports.shared import SharedTransport


def weights(number: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {
        "k": torch.randn(4, 8, generator=generator).bfloat16(),
        "q": torch.randn(4, 8, generator=generator).bfloat16(),
        "norm": torch.randn(8, generator=generator).bfloat16(),
    }


CODED = Int8Rows().apply(weights())


# The digest -----------------------------------------------------------------------------------------------------------


def test_a_format_is_part_of_the_line_of_its_tensor():
    codes, scales = torch.tensor([[1]], dtype=torch.int8), torch.tensor([1.0])
    formats = {"w": TensorFormat(name="int8_rows", dtype="BF16", scales=("w.scale",))}
    lines = (
        f'["w","I8",[1,1],"{checksum(codes)}",["int8_rows","BF16",["w.scale"]]]\n'
        f'["w.scale","F32",[1],"{checksum(scales)}"]\n'
    )
    assert digest({"w": codes, "w.scale": scales}, formats=formats) == blake3(lines.encode()).hexdigest()
    assert digest({"w": codes, "w.scale": scales}) != digest({"w": codes, "w.scale": scales}, formats=formats)


def test_a_manifest_keeps_its_formats_on_the_wire():
    manifest = build_manifest(0, 1, None, CODED.tensors, formats=CODED.formats, cast_digest="c")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest
    assert {entry.name: entry.format for entry in manifest.tensors if entry.format} == CODED.formats
    assert root_digest(manifest.tensors) == manifest.version.digest


# The reference quantiser ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 9),
    seed=st.integers(0, 99),
    magnitude=st.sampled_from([1e-30, 1, 1e4]),
)
def test_codes_are_within_half_a_step_and_the_largest_is_exact(rows, columns, seed, magnitude):
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * magnitude
    coded = Int8Rows().apply({"w": values})
    codes, scales = coded.tensors["w"], coded.tensors["w.scale"]
    assert (codes.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (rows,))
    assert torch.equal(codes.abs().amax(-1), torch.full((rows,), 127, dtype=torch.int8))
    step = scales.unsqueeze(-1)
    assert ((decode(codes, scales) - values).abs() <= 0.5 * step + 1e-5 * step * 127).all()


def test_ties_go_to_the_even_code_zero_rows_stay_zero_and_small_tensors_go_out_as_they_are():
    values = torch.tensor([[127.0, 0.5, 1.5, -2.5, -0.5], [0.0] * 5])
    coded = Int8Rows().apply({"w": values, "norm": torch.ones(3), "ids": torch.ones(2, 2, dtype=torch.int64)})
    assert coded.tensors["w"].tolist() == [[127, 0, 2, -2, 0], [0] * 5]
    assert coded.tensors["w.scale"].tolist() == [1.0, 1.0]
    assert set(coded.formats) == {"w"}
    assert sorted(coded.tensors) == ["ids", "norm", "w", "w.scale"]


def test_experts_have_a_scale_for_each_row_of_each():
    coded = Int8Rows().apply({"experts": torch.randn(3, 4, 5)})
    assert coded.tensors["experts.scale"].shape == (3, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_name(bad):
    with pytest.raises(PayloadError, match=r"'w'.*not finite"):
        Int8Rows().apply({"w": torch.tensor([[1.0, bad]])})


# Published ------------------------------------------------------------------------------------------------------------


def engine(formats=CODED.formats, receives_into=ReceivesInto.STAGING) -> MemoryReceiver:
    return MemoryReceiver(ENGINE, CODED.tensors, receives_into=receives_into, formats=formats)


class Bent:
    """Int8Rows with one thing done to what it makes."""

    def __init__(self, bend) -> None:
        self._bend = bend

    def apply(self, tensors) -> Quantised:
        coded = Int8Rows().apply(tensors)
        bent = (dict(coded.tensors), dict(coded.formats))
        self._bend(*bent)
        return Quantised(tensors=bent[0], formats=bent[1])


def publish(folder, receiver, quantiser, *numbers, transport=None):
    async def scenario():
        publisher = Publisher(
            [receiver], transport or SharedTransport(folder, memory_folder=folder), SyncConfig(), quantiser=quantiser
        )
        try:
            for number in numbers:
                report = await publisher.publish(weights(number), number, 1, InFlightMode.CONTINUE)
            return report
        finally:
            await publisher.close()

    return run_scripted(scenario())


@pytest.mark.parametrize("receives_into", list(ReceivesInto))
def test_the_digest_is_of_what_the_engine_holds_and_the_cast_is_named_beside_it(tmp_path, receives_into):
    receiver = engine(receives_into=receives_into)
    report = publish(tmp_path, receiver, Int8Rows(), 0, 1)
    coded = Int8Rows().apply(weights(1))
    assert report.version.digest == digest(receiver.weights, formats=coded.formats)
    assert report.cast_digest == digest(weights(1)) != report.version.digest
    assert all(torch.equal(receiver.weights[name], coded.tensors[name]) for name in coded.tensors)
    assert receiver.capabilities.formats == {INT8_ROWS}


def test_without_a_quantiser_the_cast_goes_out_as_it_is(tmp_path):
    receiver = MemoryReceiver(EngineId("a"), weights())
    report = publish(tmp_path, receiver, None, 0)
    assert report.cast_digest is None
    assert report.version.digest == digest(weights(0)) == digest(receiver.weights)
    assert receiver.capabilities.formats == frozenset()


def test_an_engine_that_does_not_know_a_format_refuses_by_name(tmp_path):
    with pytest.raises(PayloadError, match=r"'k' comes in format 'int8_rows'.*the engine holds it without a format"):
        publish(tmp_path, engine(formats={}), Int8Rows(), 0)


def forgotten(tensors, formats):
    del formats["q"]


def scale_missing(tensors, formats):
    del tensors["q.scale"]


def scale_added(tensors, formats):
    tensors["q.zero"] = torch.zeros(4)


def scale_of_another(tensors, formats):
    formats["q"] = msgspec.structs.replace(formats["q"], scales=("k.scale",))


def scales_exchanged(tensors, formats):
    formats["q"], formats["k"] = (
        msgspec.structs.replace(formats[name], scales=(f"{other}.scale",)) for name, other in (("q", "k"), ("k", "q"))
    )


def scale_coded(tensors, formats):
    tensors["q.scale.scale"] = torch.ones(4)
    formats["q.scale"] = TensorFormat(name="other", dtype="F32", scales=("q.scale.scale",))


def tensor_lost(tensors, formats):
    del tensors["norm"]


def tensor_changed(tensors, formats):
    tensors["norm"] = tensors["norm"] * 2


def origin_wrong(tensors, formats):
    formats["k"] = msgspec.structs.replace(formats["k"], dtype="F32")


@pytest.mark.parametrize(
    ("bend", "named"),
    [
        (forgotten, "changed tensor 'q' and gives no format"),
        (scale_missing, "'q' has its scales in 'q.scale', which is missing"),
        (scale_added, "added 'q.zero'"),
        (scale_of_another, "'q' has its scales in 'k.scale', which by its name"),
        (scales_exchanged, "'k' has its scales in 'q.scale', which by its name"),
        (scale_coded, "'q.scale' holds the scales of 'q' and is coded itself"),
        (tensor_lost, "lost tensor 'norm'"),
        (tensor_changed, "changed tensor 'norm'"),
        (origin_wrong, "tensor 'k' was F32; it was BF16"),
    ],
)
def test_a_quantiser_that_errs_is_caught_by_name_before_anything_is_held(tmp_path, bend, named):
    receiver = engine()
    with pytest.raises(PayloadError, match=named):
        publish(tmp_path, receiver, Bent(bend), 0)
    assert receiver.version is None
    assert list(tmp_path.iterdir()) == []


def without_format(manifest):
    entries = tuple(msgspec.structs.replace(entry, format=None) for entry in manifest.tensors)
    return msgspec.structs.replace(manifest, tensors=entries)


def without_scale(manifest):
    return msgspec.structs.replace(
        manifest, tensors=tuple(entry for entry in manifest.tensors if entry.name != "q.scale")
    )


def named_twice(manifest):
    return msgspec.structs.replace(manifest, tensors=(*manifest.tensors, manifest.tensors[-1]))


def of_another(manifest):
    other = TensorFormat(name=INT8_ROWS, dtype="BF16", scales=("k.scale",))
    entries = (msgspec.structs.replace(each, format=other) if each.name == "q" else each for each in manifest.tensors)
    return msgspec.structs.replace(manifest, tensors=tuple(entries))


@pytest.mark.parametrize(
    ("bend", "named"),
    [
        (without_format, "'k' comes without a format.*the engine holds it in format 'int8_rows'"),
        (without_scale, r"without a value \['q.scale'\]"),
        (named_twice, r"two tensors of the same name: \['q.scale'\]"),
        (of_another, "'q' has its scales in 'k.scale'"),
    ],
)
def test_a_manifest_that_errs_is_refused_by_the_engine_by_name(tmp_path, bend, named):
    manifest = build_manifest(0, 1, None, CODED.tensors, formats=CODED.formats)
    source = hold_and_offer(SharedTransport(tmp_path, memory_folder=tmp_path), manifest, CODED.tensors)
    into = {name: torch.zeros_like(tensor) for name, tensor in CODED.tensors.items()}
    with pytest.raises(PayloadError, match=named):
        asyncio.run(Inbox(ENGINE, formats=CODED.formats).receive(bend(manifest), source, into, None))
    assert not any(tensor.any() for tensor in into.values())


def test_scales_forgotten_on_the_way_are_found_by_name(tmp_path):
    def forget(tensors):
        tensors["q.scale"].fill_(1.0)

    script = MishapAt(what=Mishap.SPOILT, call="hold", visit=0)
    transport = FaultyTransport(SharedTransport(tmp_path, memory_folder=tmp_path), script, spoil=forget)
    with pytest.raises(PayloadError, match=r"wrong tensors: \['q.scale'\]"):
        publish(tmp_path, engine(), Int8Rows(), 0, transport=transport)
