"""A tokenizer of bytes with a chat template and tool calls, for tiny models that are made from a seed."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from fathom.text.characters import TinyVocabulary

PAD, END = "<|pad|>", "<|end|>"
_SPEAKERS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_PIECES = ('<call>{"name": "', 'bash", "arguments": {"command": "', '", "arguments": ', "}</call>", '"}}</call>')
_MAX_POSITIONS = 512
_TEMPLATE = """\
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def save_chat_bytes_tokenizer(folder: Path) -> TinyVocabulary:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into `folder`.

    Every text has tokens: its bytes. What frames a call of a tool, and of a shell above all, is a token of its own, so
    that a tiny model's contexts stay short. The template writes `<|user|>TEXT<|end|>`, calls within the assistant's
    text, and leaves out the descriptions of tools: a tiny model learns by imitation which tool there is.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (PAD, END, *_SPEAKERS)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _PIECES])
    tokenizer.save(str(folder / "tokenizer.json"))
    description = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": False,
        "model_max_length": _MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return TinyVocabulary(size=tokenizer.get_vocab_size(), max_positions=_MAX_POSITIONS)
