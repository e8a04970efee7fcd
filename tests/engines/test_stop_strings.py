"""Stop strings against their definition: the text of the whole generation, decoded anew at every token."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fathom.rollout.engines.stop_strings import StopMatcher

TEXTS = [
    "Q: what?\n\nA: that.\n\n### End",
    "emoji 🙂🙃 and 日本語 – “quoted”",
    " a  b   c\n\n\nQ:",
    "ééé ünï 🙂 a🙂b",
]


def byte_level() -> Tokenizer:
    """Pieces of characters in many tokens, and merges that cross characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words that carry their space, and bytes as tokens for whatever has none."""
    pieces = ["<end>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcQ:\n.#–", "▁a", "▁Q", "\n\n", "▁End", "A:"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
STOPS = ["\n\n", "🙂", "Q:", "b", " End", "日本", "\n\nQ", "c\n", "é ü", "🙂b", ".", "“q"]


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def defined(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> int | None:
    """How many tokens there are when the text first contains a stop string."""
    return next(
        (count for count in range(1, len(ids) + 1) if any(stop in text_of(tokenizer, ids[:count]) for stop in stops)),
        None,
    )


def matched(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[int | None, str | None]:
    matcher = StopMatcher(lambda given: text_of(tokenizer, given), stops)
    for count, token in enumerate(ids, 1):
        if (stop := matcher.push(token)) is not None:
            return count, stop
    return None, None


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_generation_ends_with_the_token_that_completes_a_stop_string(name: str, data: st.DataObject) -> None:
    """Any ids at all, among them bytes that never become characters; long enough for old ids to be dropped."""
    tokenizer = TOKENIZERS[name]
    texts = st.sampled_from(TEXTS).map(lambda text: tokenizer.encode(text).ids)
    noise = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=20)
    spells = st.sampled_from(STOPS).map(lambda text: tokenizer.encode(text).ids)
    ids = list(chain.from_iterable(data.draw(st.lists(st.one_of(texts, noise, spells), min_size=1, max_size=12))))
    stops = data.draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=4))
    count, stop = matched(tokenizer, ids, stops)
    assert count == defined(tokenizer, ids, stops)
    assert (stop is None) == (count is None)
    assert stop is None or stop in text_of(tokenizer, ids[:count])


def test_a_character_in_pieces_is_met_with_its_last_piece() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = tokenizer.encode("a").ids + [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()] * 2
    assert matched(tokenizer, ids, ["🙂"]) == (len(ids) - 4, "🙂")


def test_of_stop_strings_that_end_together_the_leftmost_is_named() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("ab\n\nQ").ids
    assert matched(tokenizer, ids, ["Q", "\n\nQ", "\nQ", "x"]) == (len(ids), "\n\nQ")


def test_special_tokens_are_no_text() -> None:
    tokenizer = TOKENIZERS["byte level"]
    end = tokenizer.token_to_id("<end>")
    q, colon = tokenizer.encode("Q").ids, tokenizer.encode(":").ids
    assert matched(tokenizer, [end, end], ["<end>", "<"]) == (None, None)
    assert matched(tokenizer, [*q, end, *colon], ["Q:"]) == (3, "Q:")
