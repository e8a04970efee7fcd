"""Versions that are wrong in one way each: every one is caught, by the name of the tensor, and the parent goes on."""

import asyncio
from functools import partial

import pytest
import torch
from offers import ENGINE

from fathom.config.sync import ChainConfig, SyncConfig
from fathom.core.errors import PayloadError
from fathom.core.ids import EngineId
from fathom.core.ports.engine import ReceivesInto
from fathom.core.records.sampling import InFlightMode
from fathom.model.language_model import LanguageModel
from fathom.model.tiny import make_tiny
from fathom.rollout.engines.embedded.server.weight_sets import WeightSets
from fathom.sync.chain.links import LinkName
from fathom.sync.chain.store import Store
from fathom.sync.digest import build_manifest, digest, layout, wrong_tensors
from fathom.sync.faults.faulty_transport import FaultyTransport, Mishap, MishapAt
from fathom.sync.faults.scripted_clock import run_scripted
from fathom.sync.held import Held
from fathom.sync.memory_receiver import MemoryReceiver
from fathom.sync.publisher import Publisher
from fathom.sync.transports.delta import DeltaTransport
from fathom.sync.transports.inbox import Inbox
from fathom.sync.transports.shared import SharedTransport
from fathom.text.characters import save_character_tokenizer

A, B = EngineId("a"), EngineId("b")
HEAD, Q, K, EXPERTS, NORM = "embed", "block.q", "block.k", "block.experts", "norm"


def weights(number: int) -> dict[str, torch.Tensor]:
    """A model with all that the mutations are about; its head is tied to `embed`."""
    generator = torch.Generator().manual_seed(number)
    shapes = {HEAD: (6, 4), Q: (4, 4), K: (4, 4), EXPERTS: (3, 2, 4), NORM: (4,)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


# What the trainer may get wrong: the manifest says it, before a byte is written ---------------------------------------


def head_untied(tensors):
    tensors["lm_head"] = tensors[HEAD].clone()


def head_tied(tensors):
    tensors["lm_head"] = tensors[HEAD]


def transposed(tensors):
    tensors[HEAD] = tensors[HEAD].t().contiguous()


def recast(tensors):
    tensors[Q] = tensors[Q].half()


def expert_missing(tensors):
    tensors[EXPERTS] = tensors[EXPERTS][:2].clone()


def experts_apart(tensors):
    stacked = tensors.pop(EXPERTS)
    tensors |= {f"{EXPERTS}.{index}": expert.clone() for index, expert in enumerate(stacked)}


def renamed(tensors):
    tensors["block.query"] = tensors.pop(Q)


def dropped(tensors):
    del tensors[NORM]


FORMS = [
    (head_untied, r"without a place \['lm_head'\]"),
    (head_tied, r"'lm_head' is tied to 'embed'"),
    (transposed, r"'embed' is .*\(4, 6\).* in v1@1, .*\(6, 4\)"),
    (recast, r"'block.q' is \('F16'.* in v1@1, \('BF16'"),
    (expert_missing, r"'block.experts' is .*\(2, 2, 4\).*\(3, 2, 4\)"),
    (experts_apart, r"without a value \['block.experts'\].*'block.experts.0'"),
    (renamed, r"without a value \['block.q'\].*without a place \['block.query'\]"),
    (dropped, r"without a value \['norm'\]"),
]

# What may happen on the way: names and forms are right, bytes are not -------------------------------------------------


def swapped(tensors):
    kept = tensors[Q].clone()
    tensors[Q].copy_(tensors[K])
    tensors[K].copy_(kept)


def head_stale(tensors):
    tensors[HEAD].copy_(weights(0)[HEAD])


def square_transposed(tensors):
    tensors[Q].copy_(tensors[Q].t().clone())


def bits_of_another_type(tensors):
    tensors[K].copy_(tensors[K].half().view(torch.bfloat16))


def one_byte(tensors):
    tensors[EXPERTS].view(-1).view(torch.uint8)[17] ^= 0x40


def expert_stale(tensors):
    tensors[EXPERTS][1] = weights(0)[EXPERTS][1]


def experts_exchanged(tensors):
    tensors[EXPERTS][[0, 2]] = tensors[EXPERTS][[2, 0]]


def applied_twice(tensors):
    """A difference by XOR, applied to what already had it, gives the parent's bits."""
    for name in (Q, NORM):
        bits, before = tensors[name].view(torch.int16), weights(0)[name].view(torch.int16)
        difference = bits ^ before
        bits.copy_(bits ^ difference)


BYTES = [
    (swapped, [K, Q]),
    (head_stale, [HEAD]),
    (square_transposed, [Q]),
    (bits_of_another_type, [K]),
    (one_byte, [EXPERTS]),
    (expert_stale, [EXPERTS]),
    (experts_exchanged, [EXPERTS]),
    (applied_twice, [Q, NORM]),
]


def caught(folder, mutated, receives_into, named, spoil=None, entries=None) -> None:
    """Version 0 serves; version 1 is wrong and is refused by name; version 0 goes on, whole; then 1 is delivered."""

    async def scenario() -> None:
        script = [MishapAt(what=Mishap.SPOILT, call="hold", visit=1)] if spoil else []
        transport = SharedTransport(folder, memory_folder=folder)
        if spoil:
            transport = FaultyTransport(transport, *script, spoil=spoil)
        engines = [MemoryReceiver(name, weights(0), receives_into=receives_into) for name in (A, B)]
        publisher = Publisher(engines, transport, SyncConfig())
        publish = partial(publisher.publish, incarnation=1, mode=InFlightMode.CONTINUE)
        await publish(weights(0), 0)
        with pytest.raises(PayloadError, match=named):
            await publish(mutated, 1, entries=entries)
        assert publisher.serving == (A, B)
        for engine in engines:
            assert engine.version == publisher.delivered
            assert digest(engine.weights) == digest(weights(0)) == publisher.delivered.digest
        assert (await publish(weights(1), 1)).committed == (A, B)
        assert all(digest(engine.weights) == digest(weights(1)) for engine in engines)
        await publisher.close()

    run_scripted(scenario())


@pytest.mark.parametrize("receives_into", list(ReceivesInto))
def test_a_version_that_changed_since_it_was_listed_is_refused_by_name(tmp_path, receives_into):
    mutated = weights(1)
    entries = layout(mutated)
    one_byte(mutated)
    caught(tmp_path, mutated, receives_into, rf"wrong tensors: \['{EXPERTS}'\]", entries=entries)


def test_a_listing_of_other_tensors_is_refused(tmp_path):
    caught(tmp_path, weights(1), ReceivesInto.STAGING, "of other tensors", entries=layout({Q: weights(1)[Q]}))


@pytest.mark.parametrize("receives_into", list(ReceivesInto))
@pytest.mark.parametrize(("change", "named"), FORMS)
def test_a_version_of_another_form_is_refused_by_name(tmp_path, receives_into, change, named):
    mutated = weights(1)
    change(mutated)
    caught(tmp_path, mutated, receives_into, named)


@pytest.mark.parametrize("receives_into", list(ReceivesInto))
@pytest.mark.parametrize(("spoil", "names"), BYTES)
def test_bytes_that_changed_on_the_way_are_found_by_name(tmp_path, receives_into, spoil, names):
    caught(tmp_path, weights(1), receives_into, f"wrong tensors: {sorted(names)}".replace("[", r"\["), spoil)


# Differences ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def chain(tmp_path):
    """Two versions in a chain, the second as a difference, and where the second is."""
    transport = DeltaTransport.open(tmp_path, ChainConfig())
    manifests = [build_manifest(0, 1, None, weights(0))]
    second = weights(0)
    second[Q][1, 2] += 1
    manifests.append(build_manifest(1, 1, manifests[0].version, second))
    for manifest, tensors in zip(manifests, (weights(0), second), strict=True):
        transport.hold(manifest, tensors)
    yield Store.of_run(tmp_path, None), manifests, transport.offer(manifests[1].version, [ENGINE]), second
    transport.close()


@pytest.mark.parametrize("base", ["parent", "itself"])
def test_a_difference_applied_twice_is_found_by_name(chain, base):
    """An engine that says it holds version 0 while version 1 lies in its memory, and no anchor can help."""
    store, manifests, source, second = chain
    store.delete(LinkName.of(manifests[0].version, anchor=True).link)
    held = Held(version=manifests[0].version, tensors=weights(0) if base == "parent" else second)
    into = {name: torch.zeros_like(tensor) for name, tensor in second.items()}
    receive = Inbox(ENGINE).receive(manifests[1], source, into, held)
    if base == "parent":
        asyncio.run(receive)
        assert digest(into) == manifests[1].version.digest
    else:
        with pytest.raises(PayloadError, match=r"'block.q'"):
            asyncio.run(receive)


def test_with_an_anchor_a_difference_applied_twice_is_put_right(chain):
    _, manifests, source, second = chain
    into = {name: torch.zeros_like(tensor) for name, tensor in second.items()}
    held = Held(version=manifests[0].version, tensors=second)
    asyncio.run(Inbox(ENGINE).receive(manifests[1], source, into, held))
    assert digest(into) == manifests[1].version.digest


# Real models, and the engine's own sets of weights --------------------------------------------------------------------


@pytest.fixture(scope="module", params=["arithmetic", "moe"])
def model(request, tmp_path_factory) -> LanguageModel:
    folder = tmp_path_factory.mktemp(request.param)
    save_character_tokenizer(folder)
    make_tiny(request.param, 0, folder)
    return LanguageModel.load(folder, torch.bfloat16, "cpu")


def pairs(tensors) -> list[str]:
    """The first two tensors of one shape."""
    for first in sorted(tensors):
        for second in sorted(tensors):
            if first < second and tensors[first].shape == tensors[second].shape and tensors[first].dim() > 1:
                return [first, second]
    raise AssertionError("no two tensors have one shape")


def test_every_tensor_of_a_model_is_found_by_name_when_one_byte_of_it_is_another(model, tmp_path):
    sets = WeightSets(model.weights())
    published = {name: tensor.detach().clone() for name, tensor in sets.live.tensors.items()}
    manifest = build_manifest(1, 1, None, published)
    transport = SharedTransport(tmp_path, memory_folder=tmp_path)
    transport.hold(manifest, published)
    staging = sets.take_staging()
    asyncio.run(Inbox(ENGINE).receive(manifest, transport.offer(manifest.version, [ENGINE]), staging.tensors, None))
    assert digest(staging.tensors) == manifest.version.digest
    for name, tensor in list(staging.tensors.items())[:: max(1, len(published) // 12)]:
        tensor.view(-1).view(torch.uint8)[-1] ^= 1
        assert wrong_tensors(manifest, staging.tensors) == (name,)
        tensor.view(-1).view(torch.uint8)[-1] ^= 1
    transport.close()


def model_head_added(tensors):
    tensors["lm_head.weight"] = torch.zeros_like(next(iter(tensors.values())))
    return "lm_head.weight"


def model_tensor_missing(tensors):
    name = max(tensors, key=lambda name: ("experts" in name, tensors[name].numel()))
    del tensors[name]
    return name


def model_expert_missing(tensors):
    name = max(tensors, key=lambda name: (tensors[name].dim(), "experts" in name))
    tensors[name] = tensors[name][:-1].clone()
    return name


def model_transposed(tensors):
    name = next(name for name in sorted(tensors) if tensors[name].dim() == 2 and len(set(tensors[name].shape)) == 2)
    tensors[name] = tensors[name].t().contiguous()
    return name


@pytest.mark.parametrize(
    "change",
    [model_head_added, model_tensor_missing, model_expert_missing, model_transposed],
    ids=lambda each: each.__name__,
)
def test_a_model_of_another_form_is_refused_by_name(model, tmp_path, change):
    sets = WeightSets(model.weights())
    published = {name: tensor.detach().clone() for name, tensor in sets.live.tensors.items()}
    if change is model_head_added and "lm_head.weight" in published:
        pytest.skip("the head of this model is its own")
    named = change(published)
    manifest = build_manifest(1, 1, None, published)
    transport = SharedTransport(tmp_path, memory_folder=tmp_path)
    transport.hold(manifest, published)
    source = transport.offer(manifest.version, [ENGINE])
    staging = sets.take_staging()
    before = digest(staging.tensors)
    with pytest.raises(PayloadError, match=f"'{named}'"):
        asyncio.run(Inbox(ENGINE).receive(manifest, source, staging.tensors, None))
    assert digest(staging.tensors) == before
    transport.close()


def test_two_tensors_of_a_model_exchanged_are_both_found_by_name(model):
    held = {name: tensor.detach().clone() for name, tensor in model.weights().items()}
    manifest = build_manifest(1, 1, None, held)
    first, second = pairs(held)
    held[first], held[second] = held[second], held[first]
    assert wrong_tensors(manifest, held) == (first, second)
