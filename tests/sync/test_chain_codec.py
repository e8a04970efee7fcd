"""The codec: every encoding gives back the new bits, says by density which it is, and takes no garbage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fathom.sync.chain.codec import BLOCK_ELEMENTS, CodecError, Decoder, Encoder, choose, count_changed, elements
from fathom.sync.chain.links import Encoding

DELTAS = [Encoding.INDEX, Encoding.XOR, Encoding.FULL]
OLD, NEW = bytes.fromhex("003f80be4a3c803f494052b9"), bytes.fromhex("003f80be4b3c803f494055b9")
"""`byte_delta` of the worked examples: six bfloat16 weights, of which two changed."""


class Given:
    """Bytes that end where they end."""

    def __init__(self, content: bytes) -> None:
        self.rest = memoryview(content)

    def take(self, size_bytes: int) -> memoryview:
        if size_bytes > len(self.rest):
            raise CodecError("too short")
        taken, self.rest = self.rest[:size_bytes], self.rest[size_bytes:]
        return taken


def encoded(encoding: Encoding, old: np.ndarray, new: np.ndarray) -> bytes:
    return b"".join(Encoder(1).encode(encoding, old, new))


def applied(encoding: Encoding, content: bytes, old: np.ndarray) -> np.ndarray:
    into, source = old.copy(), Given(content)
    Decoder().apply(encoding, source, into)
    assert len(source.rest) == 0
    return into


@st.composite
def pairs(draw):
    kind = draw(st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]))
    old = draw(arrays.arrays(kind, draw(st.integers(0, 40))))
    new = draw(arrays.arrays(kind, len(old)))
    kept = draw(arrays.arrays(np.bool_, len(old)))
    return old, np.where(kept, old, new)


@given(pair=pairs())
@settings(max_examples=100, deadline=None)
def test_every_encoding_gives_the_new_bits_back(pair):
    old, new = pair
    for encoding in DELTAS:
        assert np.array_equal(applied(encoding, encoded(encoding, old, new), old), new)
    chosen = choose(old, new, count_changed(old, new))
    assert np.array_equal(applied(chosen, encoded(chosen, old, new), old), new)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
def test_tensors_of_several_blocks(kind):
    generator = np.random.default_rng(1)
    old = generator.integers(0, 200, 2 * BLOCK_ELEMENTS + 7, dtype=kind)
    new = old.copy()
    new[[0, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, len(old) - 1]] += 3
    for encoding in DELTAS:
        assert np.array_equal(applied(encoding, encoded(encoding, old, new), old), new)


@given(pair=pairs(), cut=st.floats(0, 1), flips=st.lists(st.integers(0, 10_000), max_size=3))
@settings(max_examples=100, deadline=None)
def test_damaged_bytes_are_refused_or_give_other_bits_but_nothing_else(pair, cut, flips):
    old, new = pair
    for encoding in DELTAS:
        content = bytearray(encoded(encoding, old, new))
        content = content[: int(cut * len(content)) + 1]
        for flip in flips:
            if content:
                content[flip % len(content)] ^= 1 << flip % 8
        into = old.copy()
        try:
            Decoder().apply(encoding, Given(bytes(content)), into)
        except CodecError:
            continue
        assert into.dtype == new.dtype
        assert into.shape == new.shape


def test_the_worked_example():
    old, new = (elements(np.frombuffer(each, np.uint8), 2) for each in (OLD, NEW))
    assert (old ^ new).tobytes().hex() == "000000000100000000000700"
    assert count_changed(old, new) == 2
    assert count_changed(old, new) / len(new) == pytest.approx(0.333333333333)
    assert count_changed(old.view(np.uint8), new.view(np.uint8)) / 12 == pytest.approx(0.166666666667)
    assert list(np.flatnonzero(old.view(np.uint8) != new.view(np.uint8))) == [4, 10]
    assert new.view(np.uint8)[[4, 10]].tobytes().hex() == "4b55"
    for encoding in DELTAS:
        assert applied(encoding, encoded(encoding, old, new), old).tobytes() == NEW
    twice = applied(Encoding.XOR, encoded(Encoding.XOR, old, new), new)
    assert twice.tobytes() == OLD, "applied twice, an XOR undoes itself"


def test_how_it_is_told_depends_on_how_much_changed():
    generator = np.random.default_rng(3)
    old = generator.normal(0, 0.05, 20_000).astype(np.float32)

    def bfloat16(values: np.ndarray) -> np.ndarray:
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    def chosen(step: float) -> Encoding:
        new = bfloat16((old + generator.normal(0, step, old.shape)).astype(np.float32))
        return choose(bfloat16(old), new, count_changed(bfloat16(old), new))

    assert [chosen(step) for step in (0, 1e-6, 3e-4, 0.3)] == [
        Encoding.SAME,
        Encoding.INDEX,
        Encoding.XOR,
        Encoding.FULL,
    ]


def test_a_bomb_is_refused_before_it_takes_memory():
    zeros = np.zeros(1 << 20, np.uint8)
    ones = encoded(Encoding.FULL, zeros, zeros + 1)
    with pytest.raises(CodecError, match="too short or too long"):
        Decoder().apply(Encoding.FULL, Given(ones), np.zeros(10, np.uint8))


def test_little_changes_of_a_large_tensor_cost_about_a_byte_and_a_half_each():
    generator = np.random.default_rng(0)
    old = generator.integers(0, 1 << 16, 300_000, dtype=np.uint16)
    new = old + (generator.random(len(old)) < 0.01) * generator.choice(np.array([1, 65535], np.uint16), len(old))
    new = new.astype(np.uint16)
    content = encoded(Encoding.INDEX, old, new)
    assert len(content) < 1.5 * count_changed(old, new)
    assert len(content) < 0.01 * new.nbytes
