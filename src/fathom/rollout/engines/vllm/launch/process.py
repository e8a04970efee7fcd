"""The server's process, as its parent sees it: started, watched, ended."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self, final

import httpx
import msgspec

from fathom.config.families import Dtype
from fathom.core.adapter import AdapterForm
from fathom.core.errors import ConfigError, EngineDeadError, EngineTimeoutError
from fathom.rollout.engines.embedded.process import last_lines
from fathom.rollout.engines.vllm.launch.environment import command_of, require_environment
from fathom.rollout.engines.vllm.spec import VllmSpec

MODEL = "policy"
"""The name under which the server offers its model."""
ADAPTER = "adapter"
"""The name under which it offers the model with its adapter."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What its kernels can be told of the largest rank."""
BLOCK_TOKENS = 32
"""Tokens in a block of keys and values: the least that its CPU kernels like. Prompts are shared by whole blocks."""
_ELEMENT_BYTES = {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2}
_MOST_KV_BYTES = 4 << 30
_SPARE_BLOCKS = 8
_HERE = Path(__file__).parent
_OK = 200
_POLL_S = 0.2
_END_S = 10.0
_REAP_TRIES, _REAP_S = 10, 0.05


@final
class VllmProcess:
    """A running server. It ends by itself, within seconds, when this process ends in whatever way."""

    def __init__(self, spec: VllmSpec, process: subprocess.Popen[bytes], url: str) -> None:
        self.spec = spec
        self.url = url
        self._process = process

    @classmethod
    async def launch(cls, spec: VllmSpec) -> Self:
        """Start it and wait until it answers.

        Raises:
            ConfigError: there is no environment, or the port is taken.
            EngineDeadError: it ended.
            EngineTimeoutError: it was not healthy in time.
        """
        require_environment(spec.environment)
        port = _free_port(spec)
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(_HERE / "supervisor.py"), *_command(spec, port)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_variables(spec),
                process_group=0,  # as an embedded one's: a SIGTERM to the whole group of a run is not the engine's
            )
        host = f"[{spec.host}]" if ":" in spec.host else spec.host
        server = cls(spec, process, f"http://{host}:{port}")
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                await server._until_healthy()
        except BaseException as error:
            await server.close()
            if isinstance(error, TimeoutError):
                reason = f"was not healthy after {spec.start_timeout_s:g} s; see {spec.log_path}"
                raise EngineTimeoutError(spec.engine, reason) from error
            raise
        return server

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once the server has ended."""
        return self._process.poll() is None

    async def ended(self) -> bool:
        """True when it has ended, or does within a moment: its sockets close a little before it can be reaped."""
        for _ in range(_REAP_TRIES):
            if not self.alive:
                return True
            await asyncio.sleep(_REAP_S)
        return False

    def death(self, reason: str) -> EngineDeadError:
        """The error that says how it died."""
        code = self._process.returncode
        return EngineDeadError(self.spec.engine, f"{reason} (exit code {code})", last_lines(self.spec.log_path))

    async def close(self) -> None:
        """End all its processes and wait for that. Idempotent."""
        await asyncio.shield(asyncio.to_thread(self._end))

    def _end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _until_healthy(self) -> None:
        headers = {"authorization": f"Bearer {self.spec.token}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, trust_env=False, timeout=5.0) as http:
            while True:
                if not self.alive:
                    raise self.death("ended while it started")
                try:
                    if (await http.get("/health")).status_code == _OK:
                        return
                except httpx.TransportError:
                    pass  # not listening yet
                await asyncio.sleep(_POLL_S)


def _command(spec: VllmSpec, port: int) -> list[str]:
    model = _model(spec.model_folder)
    options = {
        "served-model-name": MODEL,
        "host": spec.host,
        "port": port,
        "dtype": spec.dtype.value,
        # Scoring a sequence of the full length samples one token more.
        "max-model-len": min(spec.max_context_tokens + 1, model.max_position_embeddings),
        "max-num-seqs": spec.max_running,
        "kv-cache-memory-bytes": _kv_bytes(spec, model),
        "block-size": BLOCK_TOKENS,
        "max-logprobs": -1,
        "logprobs-mode": "processed_logprobs",
        "scheduling-policy": "priority",
        "generation-config": "vllm",
        "worker-extension-cls": "fathom_vllm_worker.WorkerExtension",
        "weight-transfer-config": json.dumps({"backend": "fathom"}),
        "middleware": "fathom_vllm_guard.RequireToken",
    }
    flags = ["enable-scale-out", "enable-prompt-tokens-details", "skip-tokenizer-init", "disable-uvicorn-access-log"]
    if spec.step_tokens is not None:
        options["max-num-batched-tokens"] = spec.step_tokens
    if spec.adapter is not None:
        flags.append("enable-lora")
        options |= {
            "max-lora-rank": _rank(spec.adapter),
            "max-loras": 1,
            "max-cpu-loras": 1,
            "lora-modules": f"{ADAPTER}={spec.adapter_folder}",
        }
    flags += [] if spec.compile else ["enforce-eager"]
    command = [*command_of(spec.environment), "serve", str(spec.model_folder.absolute())]
    return [*command, *(f"--{name}={value}" for name, value in options.items()), *(f"--{flag}" for flag in flags)]


def _rank(form: AdapterForm) -> int:
    fitting = [rank for rank in _RANKS if rank >= form.rank]
    if not fitting:
        raise ConfigError(f"lora.rank = {form.rank}, and vLLM goes up to {_RANKS[-1]}; lower it")
    return fitting[0]


def _variables(spec: VllmSpec) -> dict[str, str]:
    """Its environment: this process's own, without what would reach into the server's packages."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_"))}
    return inherited | {
        "PYTHONPATH": str(_HERE.parent / "worker"),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CACHE_ROOT": str(spec.environment / "cache"),
        "VLLM_CPU_OMP_THREADS_BIND": _cores(spec.threads),
        "OMP_NUM_THREADS": str(spec.threads),
        "FATHOM_VLLM_TOKEN": spec.token,
        "FATHOM_VLLM_ADAPTER": "" if spec.adapter is None else str(spec.adapter_folder),
        "FATHOM_VLLM_FAULTS": ",".join(spec.faults),
    }


def _cores(threads: int) -> str:
    """The last cores that this process may use; a thread that computes gets one for itself.

    Raises:
        ConfigError: there are not so many.
    """
    cores = sorted(os.sched_getaffinity(0))
    if threads > len(cores):
        raise ConfigError(
            f"engine.threads = {threads}, but this process may use {len(cores)} cores and vLLM binds a thread to each; "
            "lower it"
        )
    return ",".join(map(str, cores[-threads:]))


class ModelFacts(msgspec.Struct, frozen=True):
    """What a model's `config.json` says about its size."""

    max_position_embeddings: int
    """Longest sequence it was made for."""
    num_hidden_layers: int
    """Layers with keys and values."""
    num_attention_heads: int
    """Query heads."""
    hidden_size: int
    """Width."""
    num_key_value_heads: int | None = None
    """Key/value heads. None: as many as query heads."""
    head_dim: int | None = None
    """Size of a head. None: the width divided among them."""


def _model(folder: Path) -> ModelFacts:
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=ModelFacts)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{folder / 'config.json'} cannot be used: {error}; give a Hugging Face model folder"
        ) from error


def _kv_bytes(spec: VllmSpec, model: ModelFacts) -> int:
    """Memory for keys and values; see `VllmSpec.kv_memory_mb`."""
    if spec.kv_memory_mb is not None:
        return spec.kv_memory_mb << 20
    heads = model.num_key_value_heads or model.num_attention_heads
    size = model.head_dim or model.hidden_size // model.num_attention_heads
    token = 2 * model.num_hidden_layers * heads * size * _ELEMENT_BYTES[spec.dtype]
    one = token * -(-(spec.max_context_tokens + 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    return max(min(one * spec.max_running, _MOST_KV_BYTES), one) + _SPARE_BLOCKS * BLOCK_TOKENS * token


def _free_port(spec: VllmSpec) -> int:
    """The port asked for, if nobody has it; or one that nobody has."""
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((spec.host, spec.port))
        except OSError as error:
            raise ConfigError(
                f"engine.port = {spec.port} on {spec.host} cannot be used ({error.strerror}); choose another, or 0 for "
                "any free one"
            ) from None
        return int(probe.getsockname()[1])
