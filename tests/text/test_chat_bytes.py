"""The tokenizer with a chat template that comes with tiny models."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.core.records.message import Message, Role, Tool, ToolCall
from fathom.core.records.sampling import FinishReason
from fathom.text.chat.reading.readers import TurnReaders
from fathom.text.chat.renderer import TurnRenderer
from fathom.text.chat_bytes import save_chat_bytes_tokenizer
from fathom.text.tokenizer import Tokenizer

_BASH = Tool(name="bash", description="", parameters=msgspec.Raw(b'{"type": "object"}'))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("chat-bytes")
    vocabulary = save_chat_bytes_tokenizer(folder)
    loaded = Tokenizer.load(folder)
    assert set(loaded.vocabulary.values()) == set(range(vocabulary.size))
    return loaded


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_every_text_survives(tokenizer: Tokenizer, text: str):
    special = set(tokenizer.special_ids.values())
    if not any(token in text for token in special):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_its_template_extends_by_what_is_new_for_tools_and_texts(tokenizer: Tokenizer):
    uses = TurnRenderer(tokenizer).properties.uses
    refused = [use.name for use, reason in uses.items() if reason and "THOUGHT" not in use.name]
    assert refused == []


@settings(max_examples=50, deadline=None)
@given(command=st.text(alphabet=st.characters(codec="ascii", min_codepoint=32), max_size=20))
def test_a_call_of_the_shell_is_short_and_is_read_back(tokenizer: Tokenizer, command: str):
    renderer = TurnRenderer(tokenizer)
    readers = TurnReaders(tokenizer, renderer.properties.calls, renderer.properties.thoughts)
    asked = [Message(role=Role.USER, content="?")]
    call = ToolCall(id="c", name="bash", arguments=json.dumps({"command": command}))
    answered = [*asked, Message(role=Role.ASSISTANT, content="", tool_calls=(call,)), *asked]
    whole = renderer.render(answered, ())
    prompt = renderer.render(asked, ())
    sampled = whole[len(prompt) : -len(prompt)]
    assert len(sampled) <= 4 + len(json.dumps(command))
    reader = readers.reader([_BASH], ())
    reader.feed(sampled.tolist())
    _, message = reader.end(FinishReason.STOP)
    assert [(made.name, json.loads(made.arguments)) for made in message.tool_calls] == [("bash", {"command": command})]
