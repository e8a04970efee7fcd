"""The one forward that both users run: the engine to sample, the trainer to differentiate.

Letters: T tokens of a packed forward, H hidden size, N rows of hidden states, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fathom.core.adapter import AdapterForm
from fathom.core.errors import ConfigError, PayloadError
from fathom.model.attention import ATTENTION_NAME, AttentionPlan
from fathom.model.families import EXPERTS_IMPLEMENTATION, WITH_EXPERTS, ModelFamily, refuse_unsupported
from fathom.model.kernels.tiled_attention import computes
from fathom.model.lora.adapter import Adapter
from fathom.model.lora.low_rank import LowRank
from fathom.model.routing import ROUTING_ARGUMENT, ExpertShape, Routing, expert_shape, install_routing

# Its bars would be drawn over the run's own progress.
transformers_logging.disable_progress_bar()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that others plan with."""

    vocab_size: int
    """Rows of the output head; some may belong to no token."""
    layers: int
    """Decoder layers, each with its own keys and values."""
    kv_heads: int
    """Key/value heads of a layer."""
    head_dim: int
    """Size of a query's and of a key's head."""
    value_head_dim: int
    """Size of a value's head."""
    max_positions: int
    """Longest sequence the model was made for, in tokens."""
    experts: ExpertShape | None
    """Routed experts. None: a dense model."""


Rows = Callable[[int], int]
"""How many rows to compute when so many are needed."""


@final
class LanguageModel:
    """A causal language model in evaluation mode: no dropout, for either user."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap a `transformers` model. Raises ConfigError when its forward would not be right here."""
        family = refuse_unsupported(model.config)
        model.set_attn_implementation(ATTENTION_NAME)
        if family in WITH_EXPERTS:
            model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
            install_routing(model, family)
        self._model = model.eval()
        head = model.get_output_embeddings()
        assert head is not None, "a causal language model has an output head"
        self._head = head
        self._rows: Rows = _as_they_are
        self._adapter: Adapter | None = None
        self.family = family
        self.shape = _shape(model, family)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: str) -> Self:
        """Read a Hugging Face folder; nothing is fetched.

        Raises:
            ConfigError: the folder is missing or incomplete, or the model is not supported.
        """
        return cls(_read(folder, dtype, device))

    @classmethod
    def load_over_one_base(cls, folder: Path, dtype: torch.dtype, device: str, count: int) -> tuple[Self, ...]:
        """`count` models over the same weights in memory, each to `adapt` in its own way; see `load` for the rest.

        None of them may change these weights.
        """
        model = _read(folder, dtype, device)
        ours = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        return tuple(cls(copy.deepcopy(model, dict[int, Any](ours))) for _ in range(count))

    def adapt(self, form: AdapterForm, seed: int) -> AdapterForm:
        """Freeze the weights and compute with a fresh adapter beside them from now on; returns its form, targets found.

        What is trained, published and received is the adapter alone: `weights` and `use` are of its tensors.

        Raises:
            ConfigError: it has an adapter already, or a target is not there.
        """
        if self._adapter is not None:
            raise ConfigError("this model has an adapter already; a model is computed with one at a time")
        self._adapter = Adapter(self._model, form, seed)
        return self._adapter.form

    @property
    def updates(self) -> Mapping[str, LowRank]:
        """The adapter's updates by the parameter that each is of. Empty: it has no adapter."""
        if self._adapter is None:
            return {}
        return {_parameter(name, self.base_weights()): each for name, each in self._adapter.updates.items()}

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the weights and of the hidden states."""
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._model.device

    @property
    def kernels(self) -> str:
        """Kernel mode, for the records: `aligned`, `tiled` (our attention on a CPU) or `sdpa` (torch's)."""
        if self._rows is not _as_they_are:
            return "aligned"
        return "tiled" if computes(self.dtype, self.device, self.shape.value_head_dim) else "sdpa"

    def hidden(
        self, token_ids: Tensor, position_ids: Tensor, plan: AttentionPlan, routing: Routing | None = None
    ) -> Tensor:
        """Final hidden states [T, H] of a packed forward. `token_ids` and `position_ids` are int64 [T].

        `routing` records which experts the tokens go to, or forces recorded ones; it is used for one forward.
        """
        if len(token_ids) != plan.tokens:
            raise ValueError(f"the plan covers {plan.tokens} tokens, the forward has {len(token_ids)}")
        padding = (0, self._rows(plan.tokens) - plan.tokens)
        output = self._model.base_model(
            input_ids=pad(token_ids, padding).unsqueeze(0),
            position_ids=pad(position_ids, padding).unsqueeze(0),
            use_cache=False,
            plan=plan,
            **{ROUTING_ARGUMENT: routing},
        )
        return output.last_hidden_state[0, : plan.tokens]

    def routing(self, tokens: int, *, forced: np.ndarray | None = None, margins: bool = False) -> Routing:
        """What `hidden` needs to record the routes of `tokens` tokens, or to force recorded ones. See `Routing`.

        Raises:
            ConfigError: the model is dense.
            RecordError: `forced` is not complete, or not of this model.
        """
        if self.shape.experts is None:
            raise ConfigError("a dense model has no expert routes; turn rollout.record_routes off")
        return Routing(self.shape.experts, tokens, self.device, forced=forced, margins=margins)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, V] of hidden states [N, H]: the head is computed in the model's dtype, then cast."""
        rows = len(hidden)
        return self._head(pad(hidden, (0, 0, 0, self._rows(rows) - rows)))[:rows].float()

    def linear_shapes(self) -> set[tuple[int, int]]:
        """(outputs, inputs) of every matrix that hidden states are multiplied with, an adapter's included."""
        shapes = {
            (each.out_features, each.in_features) for each in self._model.modules() if isinstance(each, nn.Linear)
        }
        updates = self._adapter.updates.values() if self._adapter is not None else ()
        return shapes | {(part.shape[-2], part.shape[-1]) for update in updates for part in (update.a, update.b)}

    def elementwise_widths(self) -> set[int]:
        """Elements per token of the tensors to which functions of single elements are applied."""
        config = self._model.config
        return {self.shape.head_dim, config.hidden_size, config.intermediate_size}

    def pad_rows(self, rows: Rows) -> None:
        """From now on compute n rows as `rows(n)` of them, the further ones being padding."""
        self._rows = rows

    def weights(self) -> dict[str, Tensor]:
        """The live tensors that are trained and published, under their canonical names, ordered by name.

        All of the model's; with an adapter, the adapter's alone. Raises as `base_weights`.
        """
        return self.base_weights() if self._adapter is None else self._adapter.tensors()

    def base_weights(self) -> dict[str, Tensor]:
        """The model's own live tensors under their canonical names, ordered by name, whether it has an adapter or not.

        Parameters and persistent buffers; a tensor with several names (tied weights) appears under its first one.

        Raises:
            PayloadError: two tensors overlap in memory without being the same one.
        """
        named: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            named.setdefault(id(tensor), (name, tensor))
        storages: dict[int, str] = {}
        for name, tensor in named.values():
            other = storages.setdefault(tensor.untyped_storage().data_ptr(), name)
            if other != name:
                raise PayloadError(f"tensors {other} and {name} share memory without being tied: they cannot be named")
        return dict(sorted(named.values()))

    @property
    def hidden_size(self) -> int:
        """H: elements of a hidden state."""
        return self._model.config.hidden_size

    def body_weights(self) -> dict[str, Tensor]:
        """`weights()` that hidden states depend on: all but an output head of its own."""
        weights = self.weights()
        inside = {id(tensor) for tensor in self._model.base_model.state_dict(keep_vars=True).values()}
        return {name: tensor for name, tensor in weights.items() if id(tensor) in inside}

    def vocabulary_weights(self) -> frozenset[str]:
        """Names of the weights that have a row for each id of the vocabulary: embeddings and output head."""
        ends = {id(self._model.get_input_embeddings().weight), id(self._head.weight)}
        return frozenset(name for name, tensor in self.weights().items() if id(tensor) in ends)

    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these tensors from now on: pointers are swapped, nothing is copied, tied names follow.

        Names, shapes, dtypes and devices must be those of `weights()`.

        Raises:
            PayloadError: a tensor is missing, unknown, misshapen, mistyped or elsewhere. The model is unchanged.
        """
        current = self.weights()
        if faults := _faults(current, weights):
            raise PayloadError("these weights do not fit the model: " + "; ".join(faults[:_SHOWN_FAULTS]))
        for name, tensor in current.items():
            tensor.data = weights[name].detach()

    def save(self, folder: Path) -> None:
        """Write config and own weights (safetensors) in Hugging Face layout, without adapter and tokenizer."""
        self._model.save_pretrained(folder)


def _read(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """See `LanguageModel.load`."""
    if not folder.is_dir():
        raise ConfigError(f"no model folder {folder}; `fathom models fetch` makes one")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json; give a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model folder {folder} has no weights (*.safetensors); is its download complete?")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        refuse_unsupported(config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"model folder {folder} cannot be loaded: {error}") from error
    model, report = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise ConfigError(f"model folder {folder}: {kind.replace('_', ' ')}: {sorted(map(str, report[kind]))}")
    return model.to(device)


def _as_they_are(rows: int) -> int:
    return rows


_SHOWN_FAULTS = 5


def _parameter(matrix: str, names: Mapping[str, Tensor]) -> str:
    """Name of the parameter that a matrix is; those of experts are named alike."""
    return matrix if matrix in names else f"{matrix}.weight"


def _faults(current: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    faults = [f"{name} is missing" for name in current if name not in given]
    faults += [f"{name} is unknown" for name in given if name not in current]
    for name in current.keys() & given.keys():
        want, got = current[name], given[name]
        if (want.shape, want.dtype, want.device) != (got.shape, got.dtype, got.device):
            faults.append(
                f"{name} is {got.dtype} {list(got.shape)} on {got.device}, not {want.dtype} {list(want.shape)} "
                f"on {want.device}"
            )
    return faults


def _shape(model: PreTrainedModel, family: ModelFamily) -> ModelShape:
    config = model.config
    heads = config.num_attention_heads
    if family is ModelFamily.DEEPSEEK_V3:
        # Attention gets the expanded keys and values, one pair per query head, of two sizes.
        kv_heads, head_dim, value_head_dim = heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    else:
        kv_heads = config.num_key_value_heads
        head_dim = value_head_dim = config.to_dict().get("head_dim") or config.hidden_size // heads
    return ModelShape(
        vocab_size=config.vocab_size,
        layers=config.num_hidden_layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        max_positions=config.max_position_embeddings,
        experts=expert_shape(model),
    )
