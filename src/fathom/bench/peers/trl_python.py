"""TRL in an environment of its own: made by pip, asked through one script, never imported here."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import final

import msgspec

from fathom.config.families import Dtype
from fathom.core.errors import ConfigError

REQUIREMENTS = ("trl==1.16.0", "torch==2.13.0", "transformers==5.24.0", "accelerate", "datasets")
"""What the environment holds."""
_SCRIPT = Path(__file__).with_name("trl_steps.py")
_RUN_S = 3600.0
_INSTALL_S = 3600.0
_LAST_LINES = 15


class TrlRequest(msgspec.Struct, frozen=True, tag="trl_request.1"):
    """What TRL is asked to measure. `trl_steps.py` reads it as plain JSON."""

    model: str
    """Hugging Face folder."""
    dtype: Dtype
    """Element type of the weights; bfloat16 also for what autocast may cast."""
    prompts: tuple[str, ...]
    """What the user says."""
    generations: int
    """Per prompt."""
    max_new_tokens: int
    """Exactly this many are sampled."""
    steps: int
    """Timed steps."""
    warmup: int
    """Steps before them."""
    threads: int
    """CPU threads."""
    learning_rate: float
    """Of AdamW."""


class TrlRows(msgspec.Struct, frozen=True, tag="trl_rows.1"):
    """Rows that TRL is to train on, instead of sampling some."""

    model: str
    """Hugging Face folder."""
    dtype: Dtype
    """As in `TrlRequest`."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each group's prompt."""
    answers: tuple[tuple[tuple[int, ...], ...], ...]
    """For each prompt, token ids of the answers; as many for every one. Every other answer is rewarded."""
    rows_per_forward: int
    """Rows of a micro-batch; it divides their number."""
    steps: int
    """Timed steps, all on the same rows."""
    warmup: int
    """Steps before them."""
    threads: int
    """CPU threads."""
    learning_rate: float
    """Of AdamW."""


class TrlAnswer(msgspec.Struct, frozen=True):
    """What it measured, the warm-up left out."""

    rollout_s: tuple[float, ...]
    """Seconds from the begin of each step until its rewards were asked for."""
    train_s: tuple[float, ...]
    """The rest of it."""
    mean_length: float
    """Sampled tokens per completion."""
    versions: dict[str, str]
    """Version by distribution."""


@final
class TrlPython:
    """An interpreter that has TRL."""

    def __init__(self, python: Path) -> None:
        """Raises ConfigError when there is no such interpreter, or it has no TRL."""
        self._python = python
        try:
            self._ask("-c", "import importlib.metadata as m; print(m.version('trl'), m.version('torch'))", timeout_s=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"{python} cannot run TRL ({error}); make an environment with: fathom bench train --install-trl DIR"
            ) from None

    def describe(self) -> str:
        """Its versions, in words."""
        code = 'import importlib.metadata as m; print(f\'TRL {m.version("trl")} on torch {m.version("torch")}\')'
        return self._ask("-c", code, timeout_s=60).strip()

    def run(self, request: TrlRequest | TrlRows) -> TrlAnswer:
        """Measure. Raises ConfigError with the last lines of its output when it fails."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(request.threads), "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            [str(self._python), str(_SCRIPT)],
            input=msgspec.json.encode(request) + b"\n",
            capture_output=True,
            env=environment,
            timeout=_RUN_S,
            check=False,
        )
        if done.returncode:
            raise ConfigError(f"TRL failed with {self._python}:\n{_tail(done.stderr)}")
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=TrlAnswer)

    def _ask(self, *arguments: str, timeout_s: float) -> str:
        command = [str(self._python), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True).stdout


def install_trl(folder: Path) -> Path:
    """Make a virtual environment with TRL in `folder`; returns its interpreter. Raises ConfigError."""
    python = folder / "bin" / "python"
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another place, or use it: fathom bench train --trl-python {python}")
    venv.create(folder, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS]
    try:
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=_INSTALL_S)
    except subprocess.SubprocessError as error:
        raise ConfigError(f"pip could not install TRL into {folder}: {error}; remove it and try again") from None
    return python


def _tail(output: bytes) -> str:
    return "\n".join(output.decode(errors="replace").splitlines()[-_LAST_LINES:])
