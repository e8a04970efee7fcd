"""One process, one device, plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from fathom.config.families import Dtype, ReferenceKind
from fathom.config.trainer import OptimizerConfig, TrainerConfig
from fathom.core.adapter import AdapterIdentity, MergeRounding, why_another
from fathom.core.errors import CheckpointError, ConfigError
from fathom.model.aligned import align
from fathom.model.id_logprobs import head_id_logprobs
from fathom.model.language_model import LanguageModel
from fathom.model.logprobs import head_outputs
from fathom.model.lora.merging import MergedWeights
from fathom.model.lora.peft_config import read_config
from fathom.model.lora.peft_folder import read_tensors, write_adapter
from fathom.model.routing import ExpertShape, Routing
from fathom.sync.adapters.adopt import AdapterStart, adopt
from fathom.trainer.backends.critic import CRITIC_FOLDER, ValueModel
from fathom.trainer.backends.masters import masters_of, zero_gradients
from fathom.trainer.backends.optimizers.kinds import open_optimizer
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.port import Report, Update
from fathom.trainer.backends.reference import ReferencePolicy
from fathom.trainer.backends.row_hidden import hidden_before_loss
from fathom.trainer.backends.schedule import learning_rate
from fathom.trainer.backends.state import MODEL_FOLDER, TrainerState, copy_into, read_state, write_state
from fathom.trainer.objective.outputs import TokenOutputs

TORCH_DTYPES: dict[Dtype, torch.dtype] = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}
"""What each is to torch."""


@final
class TorchBackend:
    """See `port.Backend`. The same inputs on the same machine class and thread count give the same bits."""

    def __init__(
        self,
        model_folder: Path,
        config: TrainerConfig,
        *,
        aligned: bool = False,
        adapter: AdapterStart | None = None,
        model: LanguageModel | None = None,
    ) -> None:
        """Load a Hugging Face folder in `config.dtype` on `config.device`, and begin the RL phase.

        Sets the process's number of torch threads. `adapter`: train that alone; None: the whole model.
        `model`: loaded so before, whose base others use, too; None: load it.

        Raises ConfigError when the model cannot be loaded, or cannot be `aligned` here; see also `adopt`.
        """
        torch.set_num_threads(config.threads)
        self._dtype = TORCH_DTYPES[config.dtype]
        self._model = model or LanguageModel.load(model_folder, self._dtype, config.device)
        self._folder = model_folder
        self._share_prefixes = config.share_prefixes
        self._merged: MergedWeights | None = None
        self._adapter = adopt(self._model, adapter) if adapter is not None else None
        if aligned:
            align(self._model)
        self._masters = masters_of(self._model.weights())
        self._reference_config = config.reference
        self._reference: ReferencePolicy | None = None
        self._critic: ValueModel | None = None
        if config.critic is not None:
            shared = config.share_prefixes
            self._critic = ValueModel(model_folder, config.critic, device=config.device, share_prefixes=shared)
        self.begin_phase(config.optimizer, config.steps)

    @property
    def step(self) -> int:
        """Updates applied in this phase."""
        return self._step

    @property
    def experts(self) -> ExpertShape | None:
        """See `port.Backend`."""
        return self._model.shape.experts

    @property
    def adapter(self) -> AdapterIdentity | None:
        """See `port.Backend`."""
        return self._adapter

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """float32 masters by name; with a float32 forward the parameters themselves."""
        return self._masters.tensors

    def begin_phase(self, optimizer: OptimizerConfig, steps: int) -> None:
        """See `port.Backend`."""
        self._optimizer, self._steps, self._step, self._held = optimizer, steps, 0, 0
        self._rule = open_optimizer(self._masters.tensors, optimizer, self._model.vocabulary_weights())
        self.discard()

    def logprobs(self, rows: PackedRows) -> Tensor:
        """See `port.Backend`."""
        with torch.no_grad():
            return self._forward(rows, self._routing(rows) if rows.forced else None).cpu()

    def accumulate(
        self,
        rows: PackedRows,
        loss_of: Callable[[TokenOutputs], tuple[Tensor, Report]],
        *,
        entropy: bool = False,
    ) -> tuple[Report, Routing | None]:
        """See `port.Backend`."""
        routing = self._routing(rows, margins=True) if rows.routes is not None else None
        loss, report = loss_of(self._outputs(rows, routing, entropy=entropy))
        loss.backward()
        return report, routing

    def discard(self) -> None:
        """See `port.Backend`."""
        zero_gradients(self._masters.tensors)

    def update(self, *, hold: bool = False) -> Update:
        """See `port.Backend`."""
        masters = list(self._masters.tensors.values())
        lr = 0.0 if hold else learning_rate(self._optimizer, self._step - self._held, self._steps - self._held)
        norm = float(torch.nn.utils.clip_grad_norm_(masters, self._optimizer.max_grad_norm))
        applied = math.isfinite(norm)
        if applied:
            if not hold:
                self._rule.step(lr)
                self._masters.publish()
            self._step += 1
            self._held += hold
            if self._reference is not None:
                self._reference.follow(self._step, self.weights(), self._masters.tensors)
        self.discard()
        return Update(applied=applied, grad_norm=norm, lr=lr)

    def weights(self) -> Mapping[str, Tensor]:
        """See `port.Backend`."""
        return self._model.weights()

    def whole(self) -> tuple[Mapping[str, Tensor], MergeRounding | None]:
        """See `port.Backend`."""
        if self._adapter is None:
            return self.weights(), None
        self._merged = self._merged or MergedWeights(self._model)
        return self._merged.make()

    @property
    def critic(self) -> ValueModel | None:
        """See `port.Backend`."""
        return self._critic

    @property
    def reference_digest(self) -> str | None:
        """See `port.Backend`."""
        return self._reference.digest if self._reference is not None else None

    def keep_reference(self) -> None:
        """See `port.Backend`."""
        self._reference = self._referring_to(self.weights(), self._masters.tensors)

    def reference_logprobs(self, rows: PackedRows) -> Tensor:
        """See `port.Backend`."""
        if self._reference is None:
            raise RuntimeError("no reference is kept: call keep_reference() where RL starts")
        with self._reference.takes_over(self._model):
            return self.logprobs(rows)

    def save(self, folder: Path) -> None:
        """See `port.Backend`. Leaves `model/`, `*.safetensors` and `trainer.json` in `folder`, which is made.

        With an adapter, `model/` holds that alone; the base is named by its digest.
        """
        if self._adapter is None:
            self._model.save(folder / MODEL_FOLDER)
        else:
            write_adapter(self._adapter, self.weights(), str(self._folder), folder / MODEL_FOLDER)
        state = TrainerState(
            step=self._step,
            masters=self._masters.tensors if self._masters.separate else None,
            optimizer=self._rule.state(),
            reference=self._reference.weights if self._reference is not None else None,
            averages=self._reference.averages if self._reference is not None else None,
            held=self._held,
        )
        write_state(folder, state)
        if self._critic is not None:
            self._critic.save(folder / CRITIC_FOLDER)

    def load(self, folder: Path) -> None:
        """See `port.Backend`."""
        state = read_state(folder)
        if (state.masters is not None) is not self._masters.separate:
            raise CheckpointError(f"checkpoint {folder} was made with another trainer.dtype than {self._dtype}")
        saved = self._saved_weights(folder)
        copy_into(self.weights(), saved, "the saved weights")
        if state.masters is not None:
            copy_into(self._masters.tensors, state.masters, "the saved masters")
            self._masters.publish()
            self._refuse_other_cast(saved, folder)
        self._rule.restore(state.optimizer)
        self._reference = self._restored_reference(state, folder)
        self._step, self._held = state.step, state.held
        if self._critic is not None:
            self._critic.load(folder / CRITIC_FOLDER)
        self.discard()

    def _routing(self, rows: PackedRows, *, margins: bool = False) -> Routing:
        return self._model.routing(len(rows.input_ids), forced=rows.routes if rows.forced else None, margins=margins)

    def _outputs(self, rows: PackedRows, routing: Routing | None, *, entropy: bool) -> TokenOutputs:
        targets, temperature = self._tensor(rows.targets), self._tensor(rows.temperature)
        chosen, kept, bias, ids = self._chosen_hidden(rows, routing), rows.kept, rows.bias, None
        if rows.compared is not None:
            ids = head_id_logprobs(self._model, chosen, temperature, kept, bias, rows.compared).cpu()
        found = head_outputs(self._model, chosen, targets, temperature, kept, bias, with_entropies=entropy)
        entropies = None if found.entropies is None else found.entropies.cpu()
        return TokenOutputs(logprobs=found.logprobs.cpu(), ids=ids, entropy=entropies)

    def _forward(self, rows: PackedRows, routing: Routing | None) -> Tensor:
        """float32 [N] on the device; the head is computed for tokens with loss alone."""
        targets, temperature = self._tensor(rows.targets), self._tensor(rows.temperature)
        chosen = self._chosen_hidden(rows, routing)
        return head_outputs(self._model, chosen, targets, temperature, rows.kept, rows.bias).logprobs

    def _chosen_hidden(self, rows: PackedRows, routing: Routing | None) -> Tensor:
        """[N, H]: the hidden states before the tokens with loss."""
        return hidden_before_loss(self._model, rows, routing, share_prefixes=self._share_prefixes)

    def _saved_weights(self, folder: Path) -> Mapping[str, Tensor]:
        try:
            if self._adapter is not None:
                return self._saved_adapter(folder / MODEL_FOLDER, self._adapter)
            return LanguageModel.load(folder / MODEL_FOLDER, self._dtype, "cpu").weights()
        except ConfigError as error:
            raise CheckpointError(f"checkpoint {folder}: {error}; resume from an earlier one") from error

    def _saved_adapter(self, folder: Path, identity: AdapterIdentity) -> Mapping[str, Tensor]:
        _, given = read_config(folder)
        if why := why_another(identity, given):
            raise ConfigError(f"what it holds cannot be gone on with: {why}; restore model and [lora] of this run")
        return read_tensors(folder, self.weights())

    def _refuse_other_cast(self, saved: Mapping[str, Tensor], folder: Path) -> None:
        weights = self.weights()
        if wrong := [name for name, tensor in saved.items() if not torch.equal(tensor, weights[name].cpu())]:
            raise CheckpointError(f"checkpoint {folder}: model and masters disagree on {wrong[:5]}; it is damaged")

    def _referring_to(self, weights: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> ReferencePolicy:
        return ReferencePolicy(self._reference_config, weights, masters if self._masters.separate else None)

    def _restored_reference(self, state: TrainerState, folder: Path) -> ReferencePolicy | None:
        if state.reference is None:
            return None
        averaged = self._reference_config.kind is ReferenceKind.EMA and self._masters.separate
        if averaged is not (state.averages is not None):
            raise CheckpointError(
                f"checkpoint {folder} was made with another trainer.reference; resume with its config"
            )
        averages = self._on_device(state.averages) if state.averages is not None else {}
        return self._referring_to(self._on_device(state.reference), averages)

    def _on_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self._model.device) for name, tensor in tensors.items()}

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)
