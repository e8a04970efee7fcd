from __future__ import annotations

import json

import pytest
from small_tokenizer import save_tokenizer

from fathom.core.errors import ConfigError
from fathom.text.tokenizer import Tokenizer


def test_text_comes_back_and_nothing_is_added(tmp_path):
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, adds_bos=True))
    ids = tokenizer.encode("a b\n")
    assert [tokenizer.decode_token(token) for token in ids] == ["a", " ", "b", "\n"]
    assert tokenizer.decode(ids) == "a b\n"
    assert tokenizer.encode("") == []


def test_written_special_tokens_are_these_tokens_and_readers_do_not_see_them(tmp_path):
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path))
    ids = tokenizer.encode("<s>ab</s>")
    assert [tokenizer.decode_token(token) for token in ids] == ["<s>", "a", "b", "</s>"]
    assert tokenizer.decode(ids) == "ab"


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    folder = save_tokenizer(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.load(folder).encode("abcab")) == 5


@pytest.mark.parametrize(
    ("adds_bos", "config", "front"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"add_bos_token": True}, True),
        (True, {"add_bos_token": False}, False),
    ],
)
def test_the_folder_decides_whether_plain_text_has_a_beginning(tmp_path, adds_bos, config, front):
    special = Tokenizer.load(save_tokenizer(tmp_path, adds_bos=adds_bos, config=config)).special
    assert (special.bos_id is not None) is front
    assert special.texts["bos_token"] == "<s>"


def test_every_listed_end_stops_a_generation(tmp_path):
    folder = save_tokenizer(tmp_path)
    end, turn = (Tokenizer.load(folder).encode(text)[0] for text in ("</s>", "<turn>"))
    for listed, expected in (([turn, end], {turn, end}), (turn, {turn, end}), (None, {end})):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
        assert Tokenizer.load(folder).special.stop_ids == tuple(sorted(expected))


def test_special_tokens_may_be_objects_or_in_their_own_file(tmp_path):
    folder = save_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.load(folder).special.eos_id is None
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>", "lstrip": False}}))
    assert Tokenizer.load(folder).special.eos_id == Tokenizer.load(folder).encode("</s>")[0]


def test_the_template_may_be_a_file_or_an_entry_or_one_of_several(tmp_path):
    assert Tokenizer.load(save_tokenizer(tmp_path)).template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert Tokenizer.load(save_tokenizer(tmp_path, config={"chat_template": named})).template == "D"
    folder = save_tokenizer(tmp_path, config={"chat_template": "entry"})
    assert Tokenizer.load(folder).template == "entry"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(folder).template == "file"


def test_the_digest_is_of_what_ids_mean(tmp_path):
    first = Tokenizer.load(save_tokenizer(tmp_path / "a")).digest
    assert Tokenizer.load(save_tokenizer(tmp_path / "b", config={"chat_template": "x"})).digest == first
    assert Tokenizer.load(save_tokenizer(tmp_path / "c", letters="bac")).digest != first


def test_faults_name_the_folder(tmp_path):
    with pytest.raises(ConfigError, match=rf"{tmp_path} has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)
    folder = save_tokenizer(tmp_path, config={"eos_token": "<end>"})
    with pytest.raises(ConfigError, match="no token '<end>'"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        Tokenizer.load(folder)
