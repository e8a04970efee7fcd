"""`fathom template check`: reports, verdicts, exit codes, and input that is not a template."""

import json
import sys

import pytest

from fathom.apps.cli import main as cli
from fathom.apps.cli.templates import check as command
from text.small_tokenizer import save_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n?!:.,<>/{}[]\"'_-="
GOOD = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LAST_ONLY = "{{ messages[-1].content }}"
THINKS = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def model(folder, template):
    save_tokenizer(folder, letters=LETTERS, config={"chat_template": template})
    return folder


def run(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fathom", "template", "check", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    written = capsys.readouterr()
    return ended.value.code, " ".join((written.out + written.err).split())


@pytest.mark.parametrize(
    ("template", "code", "words"),
    [
        (GOOD, 0, "is appendable: a turn costs its new tokens"),
        (THINKS, 1, "no: the chat template deletes what was thought before"),
        (LAST_ONLY, 1, "is not appendable: each turn opens a training row of its own"),
    ],
)
def test_a_verdict_and_its_exit_code(capsys, monkeypatch, tmp_path, template, code, words):
    found, text = run(capsys, monkeypatch, model(tmp_path / "model", template))
    assert (found, words in text) == (code, True), text


def test_a_template_s_file_is_read_with_the_tokenizer_of_a_folder(capsys, monkeypatch, tmp_path):
    folder = model(tmp_path / "model", "{{ messages[0].content }}")
    file = tmp_path / "good.jinja"
    file.write_text(GOOD)
    assert run(capsys, monkeypatch, file, "--tokenizer", folder)[0] == 0
    renamed = tmp_path / "some.json"
    renamed.write_bytes((folder / "tokenizer.json").read_bytes())
    assert run(capsys, monkeypatch, file, "--tokenizer", renamed, "--stop", "</s>")[0] == 0


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "line 1 of the chat template"),
        ("Dear reader,", "does not write what a user says"),
        ("{{ 'x' * 10 ** 10 }}", "may be too large"),
        ("{{ 1 // 0 }}", "the chat template refuses this conversation"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "the chat template refuses this conversation"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_is_no_template_ends_with_a_line_and_code_2(capsys, monkeypatch, tmp_path, template, words):
    code, text = run(capsys, monkeypatch, model(tmp_path / "model", template))
    assert (code, words in text) == (2, True), text


def test_a_template_that_does_not_end_is_not_waited_for(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "_LIMIT_S", 0.2)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    code, text = run(capsys, monkeypatch, model(tmp_path / "model", loops))
    assert (code, "does it loop for ever" in text) == (2, True), text


def test_input_that_is_not_there_or_not_enough(capsys, monkeypatch, tmp_path):
    jinja = tmp_path / "a.jinja"
    jinja.write_text(GOOD)
    broken = tmp_path / "broken.jinja"
    broken.write_bytes(b"\xff\xfe\x00")
    folder = model(tmp_path / "model", GOOD)
    other = tmp_path / "renamed.json"
    other.write_bytes((folder / "tokenizer.json").read_bytes())
    nothing = tmp_path / "nothing.json"
    nothing.write_text(json.dumps({}))
    (tmp_path / "empty").mkdir()
    for arguments, words in [
        ((tmp_path / "absent",), "neither a model folder nor the file"),
        ((jinja,), "add --tokenizer"),
        ((jinja, "--tokenizer", tmp_path / "empty"), "has no tokenizer.json"),
        ((jinja, "--tokenizer", nothing, "--stop", "</s>"), "is not a tokenizer"),
        ((jinja, "--tokenizer", other), "name them, as in --stop"),
        ((jinja, "--tokenizer", folder, "--stop", "<nope>"), "has no token '<nope>'"),
        ((broken, "--tokenizer", folder), "is not text"),
        ((folder, "--tokenizer", folder), "leave out --tokenizer"),
        ((tmp_path / "empty",), "has no tokenizer.json"),
    ]:
        code, text = run(capsys, monkeypatch, *arguments)
        assert (code, words in text) == (2, True), text
