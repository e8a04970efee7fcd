"""The shared chat templates, each with a tokenizer that has its special tokens."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import msgspec
import pytest
import tokenizers

from fathom.core.records.message import Message, Role, Tool, ToolCall
from fathom.text.chat.reading.readers import TurnReaders
from fathom.text.chat.renderer import TurnRenderer
from fathom.text.chat.template_text import TemplateText
from fathom.text.tokenizer import SpecialTokens, Tokenizer

SHARED = Path(os.environ.get("FATHOM_SHARED", Path(__file__).parents[3] / "shared"))
needs_shared = pytest.mark.skipif(
    not (SHARED / "templates").is_dir(), reason="needs the shared templates and tokenizers (set FATHOM_SHARED)"
)
_EOS = "<｜end▁of▁sentence｜>"
FAMILIES = {
    "qwen": ("qwen2", {"eos_token": "<|im_end|>"}, ["<|im_end|>", "<|endoftext|>"]),
    "llama": (
        "llama3",
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ["<|eot_id|>", "<|end_of_text|>"],
    ),
    "glm": ("qwen2", {"eos_token": "<|endoftext|>"}, ["<|user|>", "<|observation|>", "<|endoftext|>"]),
    "gpt_oss": ("qwen2", {"eos_token": "<|return|>"}, ["<|return|>", "<|call|>", "<|endoftext|>"]),
    "deepseek": ("qwen2", {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": _EOS}, [_EOS]),
}
"""By the beginning of a template's name: tokenizer, special tokens by role, stop tokens."""
TEMPLATES = (
    "qwen2_5_instruct",
    "qwen3",
    "qwen3_instruct_2507",
    "qwen3_coder",
    "llama3_1_instruct",
    "glm_4_6",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v3_1",
)
TOOLS = tuple(
    Tool(
        name=name,
        description=f"Does {name}.",
        parameters=msgspec.Raw(
            b'{"type": "object", "properties": {"path": {"type": "string"}, "count": {"type": "integer"}, '
            b'"deep": {"type": "boolean"}, "more": {"type": "object"}}}'
        ),
    )
    for name in ("read_file", "run")
)


def source(name: str) -> str:
    return (SHARED / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def _core(file: str) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer.from_file(str(SHARED / "tokenizers" / f"{file}.tokenizer.json"))
    if file == "qwen2":  # also used for families without a tokenizer here: theirs are written as one token too
        written = "".join(source(name) for name in TEMPLATES if not name.startswith("llama"))
        marks = set(re.findall(r"<\|\w+\|>|<｜[\w▁]+｜>|\[gMASK\]|<sop>", written)) | {_EOS, "<｜begin▁of▁sentence｜>"}
        core.add_special_tokens(sorted(mark for mark in marks if core.token_to_id(mark) is None))
    return core


def tokenizer_for(template: str | None, family: str) -> Tokenizer:
    file, texts, stops = FAMILIES[family]
    core = _core(file)
    ids = tuple(sorted(core.token_to_id(stop) for stop in stops))
    special = SpecialTokens(texts=texts, bos_id=None, eos_id=core.token_to_id(texts["eos_token"]), stop_ids=ids)
    return Tokenizer(core, special, template)


@functools.cache
def model(name: str) -> tuple[Tokenizer, TurnRenderer, TurnReaders]:
    family = next(family for family in FAMILIES if name.startswith(family))
    tokenizer = tokenizer_for(source(name), family)
    renderer = TurnRenderer(tokenizer)
    properties = renderer.properties
    return tokenizer, renderer, TurnReaders(tokenizer, properties.calls, properties.thoughts)


@functools.cache
def writer(name: str) -> TemplateText:
    return TemplateText(source(name), model(name)[0].special.texts)


def spelled(tokenizer: Tokenizer, ids) -> str:
    """Special tokens written out; for text whose characters are whole."""
    written, plain = "", []
    for token_id in [*ids, None]:
        if token_id is None or token_id in tokenizer.special_ids:
            written += tokenizer.decode(plain)
            written += "" if token_id is None else tokenizer.special_ids[token_id]
            plain = []
        else:
            plain.append(token_id)
    return written


def user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


def system(content: str) -> Message:
    return Message(role=Role.SYSTEM, content=content)


def answer(content: str = "", *calls: ToolCall, reasoning: str = "") -> Message:
    return Message(role=Role.ASSISTANT, content=content, reasoning=reasoning, tool_calls=calls)


def called(name: str, arguments: str, call_id: str = "abcdef123") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def result(content: str, call_id: str = "abcdef123", name: str = "") -> Message:
    return Message(role=Role.TOOL, content=content, tool_call_id=call_id, name=name)
