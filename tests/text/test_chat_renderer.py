from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tokenizers
from small_tokenizer import save_tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from fathom.core.errors import ConfigError, DataError
from fathom.text.chat_renderer import ChatRenderer
from fathom.text.tokenizer import SpecialTokens, Tokenizer

SHARED = Path(os.environ.get("FATHOM_SHARED", Path(__file__).parents[3] / "shared"))
needs_shared = pytest.mark.skipif(
    not (SHARED / "templates").is_dir(), reason="needs the shared templates and tokenizers (set FATHOM_SHARED)"
)

USER = {"role": "user", "content": "  What is 12+7?\n<b>“tea” & 'cake'</b> "}
CONVERSATIONS = {
    "user": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "\n\n19, I <think>hm</think> think."}, USER],
}
SPECIAL = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen2": {"eos_token": "<|im_end|>"},
}
TEMPLATES = {
    "llama3_1_instruct": "llama3",
    "deepseek_v3": "llama3",
    "deepseek_v3_1": "llama3",
    "glm_4_6": "llama3",
    "gpt_oss": "llama3",
    "qwen2_5_instruct": "qwen2",
    "qwen3": "qwen2",
    "qwen3_coder": "qwen2",
    "qwen3_instruct_2507": "qwen2",
}
"""Which tokenizer reads a template's text: its own, or for families without one here, any."""


def template(name):
    return (SHARED / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=list(SPECIAL))
def real(request):
    """(name, our renderer by template name, the tokenizer as `transformers` reads it)."""
    texts = SPECIAL[request.param]
    core = tokenizers.Tokenizer.from_file(str(SHARED / "tokenizers" / f"{request.param}.tokenizer.json"))
    if request.param == "llama3":  # the published one begins plain text; a template's text must not begin twice
        core.post_processor = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 128000)]
        )
    ids = {role: core.token_to_id(text) for role, text in texts.items()}
    eos_id = ids["eos_token"]
    special = SpecialTokens(texts=texts, bos_id=ids.get("bos_token"), eos_id=eos_id, stop_ids=(eos_id,))

    def renderer(name):
        return ChatRenderer(Tokenizer(core, special, template(name)), use_template=True)

    return request.param, renderer, PreTrainedTokenizerFast(tokenizer_object=core, **texts)


@needs_shared
def test_prompts_equal_those_of_transformers(real):
    owner, renderer, theirs = real
    for name in [name for name, tokenizer in TEMPLATES.items() if tokenizer == owner]:
        ours = renderer(name)
        for kind, messages in CONVERSATIONS.items():
            expected = theirs.apply_chat_template(
                messages, chat_template=template(name), add_generation_prompt=True, return_dict=False
            )
            assert ours.render_prompt(messages).tolist() == expected, f"{name}, {kind}"


@needs_shared
def test_a_prompt_begins_once_and_an_answer_ends_as_the_template_ends_it(real):
    owner, renderer, theirs = real
    ours = renderer("llama3_1_instruct" if owner == "llama3" else "qwen2_5_instruct")
    prompt = ours.render_prompt(CONVERSATIONS["system"]).tolist()
    assert prompt[:2] == ([128000, 128006] if owner == "llama3" else [151644, 8948])
    assert prompt.count(128000) == (owner == "llama3")
    assert theirs.convert_ids_to_tokens(ours.end_id()) == SPECIAL[owner]["eos_token"]


@needs_shared
@pytest.mark.parametrize("real", ["qwen2"], indirect=True)
def test_an_answer_that_begins_with_newlines_leaves_the_prompt_as_it_was(real):
    """`pitfalls.md` 32: encoded as one text, the header's newline would merge with the answer's."""
    _, renderer, _ = real
    ours = renderer("qwen2_5_instruct")
    prompt = ours.render_prompt([USER])
    shown = ours.render_demonstration([USER], "\n\nOK", "test")
    assert prompt[-3:].tolist() == [151644, 77091, 198]
    assert shown.token_ids[: len(prompt)].tolist() == prompt.tolist()
    assert shown.token_ids[len(prompt) :].tolist() == [271, 3925, 151645]
    assert shown.loss_mask.tolist() == [False] * len(prompt) + [True] * 3


def load(folder, **options):
    return Tokenizer.load(save_tokenizer(folder, **options))


def messages(*contents, role="user"):
    return [{"role": role, "content": content} for content in contents]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_without_a_template_contents_are_joined_behind_one_beginning(tmp_path, adds_bos):
    tokenizer = load(tmp_path, adds_bos=adds_bos)
    ids = ChatRenderer(tokenizer, use_template=False).render_prompt(messages("ab", "c"))
    assert ids.dtype == "int32"
    assert [tokenizer.decode_token(token) for token in ids.tolist()] == ["<s>"] * adds_bos + ["a", "b", "c"]


def test_a_template_alone_decides_on_the_beginning(tmp_path):
    tokenizer = load(tmp_path, adds_bos=True, config={"chat_template": "{{ messages[0].content }}"})
    ids = ChatRenderer(tokenizer, use_template=True).render_prompt(messages("a"))
    assert [tokenizer.decode_token(token) for token in ids.tolist()] == ["a"]


@pytest.mark.parametrize(
    ("source", "stops", "end"),
    [
        ("{% for m in messages %}{{ m.content }}<turn>{% endfor %}", ["<turn>", "</s>"], "<turn>"),
        ("{% for m in messages %}{{ m.content }}<turn>{% endfor %}", ["</s>"], "</s>"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ["<turn>", "</s>"], "</s>"),
        (None, ["<turn>", "</s>"], "</s>"),
    ],
)
def test_a_demonstration_is_the_prompt_the_answer_and_its_end(tmp_path, source, stops, end):
    folder = save_tokenizer(tmp_path, letters="fathomb ", config={"chat_template": source} if source else {})
    ids = [Tokenizer.load(folder).encode(text)[0] for text in stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer = Tokenizer.load(folder)
    renderer = ChatRenderer(tokenizer, use_template=source is not None)
    shown = renderer.render_demonstration(messages("ab"), "a", "example")
    prompt = renderer.render_prompt(messages("ab"))
    texts = [tokenizer.decode_token(token) for token in shown.token_ids.tolist()]
    assert shown.token_ids[: len(prompt)].tolist() == prompt.tolist()
    assert texts[len(prompt) :] == ["a", end]
    assert shown.loss_mask.tolist() == [False] * len(prompt) + [True, True]
    assert shown.source == "example"


def test_templates_may_use_what_transformers_gives_them(tmp_path):
    source = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson | replace('\"', '') }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%%') | replace('%', '?') }}{% if not add_generation_prompt %}\n{% endif %}"
    )
    tokenizer = load(tmp_path, config={"chat_template": source})
    ids = ChatRenderer(tokenizer, use_template=True).render_prompt(messages("a", "b", "c"))
    assert tokenizer.decode(ids.tolist()) == "ab?"


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", DataError, "roles must alternate"),
        ("{{ messages[9].content }}", DataError, "refuses a conversation with roles"),
        ("{{ 1 // 0 }}", DataError, "division"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", DataError, "recursion"),
        ("{{ ''.__class__.__mro__ }}", DataError, "unsafe"),
        ("", DataError, "prompt is empty"),
        ("{{ messages[0].content }}!", ConfigError, "cannot encode"),
        ("{% for %}", ConfigError, "line 1 of the chat template"),
        (None, ConfigError, "has no chat template; set model.chat_template = false"),
    ],
)
def test_faults_are_told(tmp_path, source, error, message):
    tokenizer = load(tmp_path, config={"chat_template": source})
    with pytest.raises(error, match=message):
        ChatRenderer(tokenizer, use_template=True).render_prompt(messages("a"))


def test_the_identity_says_whether_a_template_was_used(tmp_path):
    tokenizer = load(tmp_path, config={"chat_template": "{{ messages[0].content }}"})
    used, unused = (ChatRenderer(tokenizer, use_template=use).identity for use in (True, False))
    assert used.tokenizer == unused.tokenizer == tokenizer.digest
    assert used.template != unused.template
    none = load(tmp_path / "none")
    assert ChatRenderer(none, use_template=False).identity.template == unused.template


def test_an_answer_needs_an_end(tmp_path):
    folder = save_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no eos_token"):
        ChatRenderer(Tokenizer.load(folder), use_template=False).render_demonstration(messages("a"), "b", "test")
