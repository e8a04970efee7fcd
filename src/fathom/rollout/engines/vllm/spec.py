"""What it takes to start a vLLM server, or to attach to one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_urlsafe

from fathom.config.families import Dtype
from fathom.core.ids import EngineId


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
    kv_memory_mib: int = 512
    """Memory for keys and values."""
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
