from __future__ import annotations

import pytest

from fathom.core.errors import ConfigError
from fathom.text.characters import save_character_tokenizer
from fathom.text.chat_renderer import ChatRenderer
from fathom.text.tokenizer import Tokenizer


def test_characters_come_back_and_others_are_refused(tmp_path):
    vocabulary, tokenizer = save_character_tokenizer(tmp_path), Tokenizer.load(tmp_path)
    text = "12+7=(a.b) - 3*4/5\n?,:xyz"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert max(ids) < vocabulary.size < 64
    assert tokenizer.decode(ids) == text
    with pytest.raises(ConfigError, match="cannot encode"):
        tokenizer.encode("1€")


def test_a_prompt_begins_once_and_an_answer_ends(tmp_path):
    save_character_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    renderer = ChatRenderer(tokenizer, use_template=False)
    shown = renderer.render_demonstration([{"role": "user", "content": "12+7="}], "19", "test")
    texts = [tokenizer.decode_token(token) for token in shown.token_ids.tolist()]
    assert texts == ["<bos>", *"12+7=", *"19", "<eos>"]
    assert tokenizer.special.stop_ids == (renderer.end_id(),)
