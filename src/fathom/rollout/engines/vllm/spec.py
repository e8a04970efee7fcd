"""What it takes to start a vLLM server, or to attach to one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_urlsafe

from fathom.config.families import Dtype
from fathom.config.rollout import EngineConfig
from fathom.config.vllm import VllmConfig
from fathom.core.adapter import AdapterForm
from fathom.core.ids import EngineId
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.rollout.engines.vllm.launch.environment import default_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSpec:
    """One engine. Its weights serve nothing until a version is committed."""

    engine: EngineId
    """Its name in records."""
    model_folder: Path
    """Hugging Face folder; it says which tensors a version consists of."""
    log_path: Path
    """Where the server writes its log (appended)."""
    max_context_tokens: int
    """Longest sequence, prompt and sampled."""
    environment: Path
    """Folder of the Python environment that holds vLLM. Not looked at with `url`."""
    url: str | None = None
    """Attach to this server instead of starting one."""
    dtype: Dtype = Dtype.FLOAT32
    """Element type of weights and KV."""
    max_running: int = 64
    """Sequences decoded in one batch."""
    threads: int = 1
    """CPU threads that compute, each bound to a core."""
    step_tokens: int | None = None
    """Tokens computed at once. None: vLLM's own choice."""
    kv_memory_mb: int | None = None
    """Memory for keys and values, in MiB. None: what `max_running` longest sequences need, but at most 4 GiB unless
    one alone needs more."""
    adapter: AdapterForm | None = None
    """Versions are adapters of this form, for the weights of the folder. None: they are whole models."""
    compile: bool = False
    """Compile the model: faster decoding, a start that is longer by about a minute."""
    host: str = "127.0.0.1"
    """Interface it listens on."""
    port: int = 0
    """Port it listens on. 0: any free one."""
    token: str = field(default_factory=token_urlsafe, repr=False)
    """Bearer token of every call. Default: a fresh random one."""
    faults: tuple[str, ...] = ()
    """Faults that the worker commits on purpose, by name (`worker/fathom_vllm_worker.py`). For tests."""
    start_timeout_s: float = 180.0
    """Deadline for it to become healthy."""
    call_timeout_s: float = 30.0
    """Deadline of a short call: abort, status, rollback, health."""
    weights_timeout_s: float = 120.0
    """Deadline of each of stage, verify, commit."""
    request_timeout_s: float = 600.0
    """Deadline of a generation or a scoring."""

    @property
    def adapter_folder(self) -> Path:
        """Where the adapter lies that the server loads, beside its log."""
        return self.log_path.parent.absolute() / f"{self.engine}-adapter"


def vllm_spec(spec: EmbeddedSpec, config: EngineConfig) -> VllmSpec:
    """What a run asks of every engine, and what it asks of vLLM."""
    own = config.vllm or VllmConfig()
    return VllmSpec(
        engine=spec.engine,
        model_folder=spec.model_folder,
        log_path=spec.log_path,
        max_context_tokens=spec.max_context_tokens,
        environment=Path(own.environment) if own.environment is not None else default_folder(),
        url=own.url,
        dtype=spec.dtype,
        max_running=spec.max_running,
        threads=spec.threads,
        step_tokens=spec.step_tokens,
        kv_memory_mb=spec.kv_memory_mb,
        adapter=spec.adapter,
        compile=own.compile,
        host=spec.host,
        port=spec.port,
        token=spec.token,
        start_timeout_s=spec.start_timeout_s,
        call_timeout_s=spec.call_timeout_s,
        weights_timeout_s=spec.weights_timeout_s,
        request_timeout_s=spec.request_timeout_s,
    )
