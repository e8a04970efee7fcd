"""The engine's process, as its parent sees it: started, watched, ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_urlsafe
from typing import Self, final

import msgspec

from fathom.config.families import Dtype, Speculation
from fathom.core.adapter import AdapterForm
from fathom.core.errors import ConfigError, EngineDeadError, EngineTimeoutError
from fathom.core.ids import EngineId
from fathom.rollout.engines.embedded.messages import EngineConfigLine, ReadyLine, StartLine

_MODULE = "fathom.rollout.engines.embedded.server"
_LAST_LINES = 20
_LOG_TAIL_BYTES = 16 * 1024
_TERMINATE_S = 3.0
_REAP_TRIES, _REAP_S = 10, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSpec:
    """One engine to launch."""

    engine: EngineId
    """Its name in records."""
    model_folder: Path
    """Hugging Face folder; its weights serve nothing until a version is committed."""
    log_path: Path
    """Where the process writes its log (appended)."""
    max_context_tokens: int
    """Longest sequence, prompt and sampled."""
    max_running: int = 64
    """Sequences decoded in one batch."""
    step_tokens: int | None = None
    """Tokens of one forward at most. None: 512, or twice `max_running` if that is more."""
    kv_memory_mb: int | None = None
    """Memory for keys and values, in MiB. None: what `max_running` longest sequences need, up to 4 GiB."""
    dtype: Dtype = Dtype.FLOAT32
    """Element type of weights and KV."""
    device: str = "cpu"
    """Torch device."""
    threads: int = 1
    """CPU threads."""
    adapter: AdapterForm | None = None
    """Versions are adapters of this form, for the weights of the folder. None: they are whole models."""
    beside: tuple[AdapterForm, ...] = ()
    """Forms of further adapters that the same process computes with; see `shared_processes`."""
    aligned: bool = False
    """Compute in aligned mode: the trainer's bits, whatever the batch."""
    speculation: Speculation = Speculation.NONE
    """Who drafts tokens."""
    draft_tokens: int = 4
    """Tokens drafted at once for a sequence, at most."""
    draft_model_folder: Path | None = None
    """Hugging Face folder of the model that drafts, for `Speculation.DRAFT_MODEL`. None: no model does."""
    host: str = "127.0.0.1"
    """Interface it listens on."""
    port: int = 0
    """Port it listens on. 0: any free one."""
    token: str = field(default_factory=token_urlsafe, repr=False)
    """Bearer token of every call. Default: a fresh random one."""
    start_timeout_s: float = 120.0
    """Deadline for it to become healthy."""
    call_timeout_s: float = 30.0
    """Deadline of a short call: abort, status, rollback, health."""
    weights_timeout_s: float = 120.0
    """Deadline of each of stage, verify, commit."""
    request_timeout_s: float = 600.0
    """Deadline of a generation or a scoring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How a running engine is spoken to."""

    engine: EngineId
    """Its name in records."""
    url: str
    """Where it listens."""
    token: str = field(repr=False)
    """Bearer token of every call."""
    call_timeout_s: float = 30.0
    """Deadline of a short call: abort, status, rollback, health."""
    weights_timeout_s: float = 120.0
    """Deadline of each of stage, verify, commit."""
    request_timeout_s: float = 600.0
    """Deadline of a generation or a scoring."""


@final
class EngineProcess:
    """A running process. It ends by itself, within a second, when this process ends in whatever way."""

    def __init__(self, spec: EmbeddedSpec, process: subprocess.Popen[bytes], ready: ReadyLine) -> None:
        self.spec = spec
        self.capabilities = ready.capabilities
        self._port = ready.port
        self._process = process

    @classmethod
    async def launch(cls, spec: EmbeddedSpec) -> Self:
        """Start it and wait until it answers.

        Raises:
            ConfigError: it cannot start as configured (port taken, model unusable).
            EngineDeadError: it ended.
            EngineTimeoutError: it was not healthy in time.
        """
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": str(spec.threads)},
                process_group=0,  # schedulers send SIGTERM to the whole group of a run; when an engine ends, it decides
            )
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                line = await asyncio.to_thread(_start, process, _config_line(spec))
        except BaseException as error:
            await _end(process)
            if isinstance(error, TimeoutError):
                reason = f"was not healthy after {spec.start_timeout_s:g} s; see {spec.log_path}"
                raise EngineTimeoutError(spec.engine, reason) from error
            raise
        if isinstance(line, ReadyLine):
            return cls(spec, process, line)
        await _end(process)
        if line is None:
            raise EngineDeadError(spec.engine, "ended while it started", last_lines(spec.log_path))
        raise ConfigError(f"engine {spec.engine}: {line.reason}")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def url(self) -> str:
        """Where it listens."""
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        return f"http://{host}:{self._port}"

    @property
    def reach(self) -> Reach:
        """How it is spoken to."""
        return Reach(
            engine=self.spec.engine,
            url=self.url,
            token=self.spec.token,
            call_timeout_s=self.spec.call_timeout_s,
            weights_timeout_s=self.spec.weights_timeout_s,
            request_timeout_s=self.spec.request_timeout_s,
        )

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    async def ended(self) -> bool:
        """True when it has ended, or does within a moment: its sockets close a little before it can be reaped."""
        for _ in range(_REAP_TRIES):
            if not self.alive:
                return True
            await asyncio.sleep(_REAP_S)
        return False

    def death(self, reason: str, *, may_have_begun: bool) -> EngineDeadError:
        """The error that says how it died."""
        code, log = self._process.returncode, last_lines(self.spec.log_path)
        return EngineDeadError(self.spec.engine, f"{reason} (exit code {code})", log, may_have_begun=may_have_begun)

    async def close(self) -> None:
        """Terminate it, kill it if that takes too long, and wait for its end. Idempotent."""
        await _end(self._process)


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate and reap, whatever happens to the caller meanwhile."""
    await asyncio.shield(asyncio.to_thread(_terminate, process))


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_TERMINATE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def last_lines(path: Path) -> str:
    """The end of a log."""
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        text = log.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-_LAST_LINES:]) or "(empty)"


def _config_line(spec: EmbeddedSpec) -> bytes:
    line = EngineConfigLine(
        engine=spec.engine,
        model_folder=str(spec.model_folder),
        dtype=spec.dtype,
        device=spec.device,
        threads=spec.threads,
        max_running=spec.max_running,
        step_tokens=spec.step_tokens,
        kv_memory_mb=spec.kv_memory_mb,
        max_context_tokens=spec.max_context_tokens,
        adapters=(*(() if spec.adapter is None else (spec.adapter,)), *spec.beside),
        aligned=spec.aligned,
        speculation=spec.speculation,
        draft_tokens=spec.draft_tokens,
        draft_model_folder=None if spec.draft_model_folder is None else str(spec.draft_model_folder),
        host=spec.host,
        port=spec.port,
        token=spec.token,
    )
    return msgspec.json.encode(line) + b"\n"


def _start(process: subprocess.Popen[bytes], config: bytes) -> StartLine | None:
    """Send the config, wait for the answer. None: the process ended. Blocks; ends when the process does."""
    if process.stdin is None or process.stdout is None:
        raise AssertionError("the process has pipes")
    try:
        process.stdin.write(config)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    line = process.stdout.readline()
    return msgspec.json.decode(line, type=StartLine) if line else None
