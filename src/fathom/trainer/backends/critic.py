"""The value model of PPO. Letters: N tokens with loss, H hidden size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fathom.config.trainer import CriticConfig
from fathom.core.errors import CheckpointError
from fathom.model.language_model import LanguageModel
from fathom.trainer.backends.masters import zero_gradients
from fathom.trainer.backends.optimizers.kinds import open_optimizer
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.port import Report, Update
from fathom.trainer.backends.row_hidden import hidden_before_loss
from fathom.trainer.backends.schedule import learning_rate
from fathom.trainer.backends.state import copy_into, write_tensors

CRITIC_FOLDER = "critic"
"""Where a checkpoint of the trainer keeps it."""
_HEAD = "value_head"
_WEIGHTS_FILE = "critic.safetensors"
_OPTIMIZER_FILE = "critic_optimizer.safetensors"
_STATE_FILE = "critic.json"


class _Written(msgspec.Struct, frozen=True, tag="critic_state.1", forbid_unknown_fields=True):
    """Written last: without it a critic's checkpoint is not whole."""

    step: int
    """Updates applied."""
    steps: int
    """Updates planned."""


@final
class ValueModel:
    """See `port.Critic`. A copy of the policy's body with one number as its head, float32, with its own optimizer.

    The value at a token is computed from the hidden state before it: what the critic expects of the rest of the
    trajectory when the token is about to be sampled. The head starts at 0, so do all values. Gradients of `accumulate`
    add up until `update` or `discard` consumes them.
    """

    def __init__(self, model_folder: Path, config: CriticConfig, *, device: str, share_prefixes: bool = True) -> None:
        """Load the body of a Hugging Face folder; see `TrainerConfig.share_prefixes`.

        Raises ConfigError when it cannot be loaded.
        """
        self._config = config
        self._share_prefixes = share_prefixes
        self._model = LanguageModel.load(model_folder, torch.float32, device)
        self._head = nn.Linear(self._model.hidden_size, 1, device=device)
        body = self._model.body_weights()
        trained = {name: tensor for name, tensor in body.items() if isinstance(tensor, nn.Parameter)}
        for name, tensor in self._model.weights().items():
            if name not in trained and isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(False)
        self._body = body
        self._masters = trained | {f"{_HEAD}.{name}": tensor for name, tensor in self._head.named_parameters()}
        self.begin({}, 1)

    @property
    def step(self) -> int:
        """Updates applied."""
        return self._step

    @property
    def warmup_steps(self) -> int:
        """First steps that train the critic alone."""
        return self._config.warmup_steps

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """See `port.Critic`."""
        return self._masters

    @torch.no_grad()
    def begin(self, weights: Mapping[str, Tensor], steps: int) -> None:
        """Start over from a policy's `weights`, by canonical name, with `steps` planned updates; values are 0.

        Tensors that `weights` does not have stay those of the folder.
        """
        for name, tensor in self._body.items():
            if name in weights:
                tensor.copy_(weights[name])
        for tensor in self._head.parameters():
            tensor.zero_()
        self._step, self._steps = 0, steps
        self._rule = open_optimizer(self._masters, self._config.optimizer, self._model.vocabulary_weights())
        self.discard()

    def values(self, rows: PackedRows) -> Tensor:
        """float32 [N] on the CPU: values at the tokens with loss, without gradient."""
        with torch.no_grad():
            return self._forward(rows).cpu()

    def accumulate(self, rows: PackedRows, loss_of: Callable[[Tensor], tuple[Tensor, Report]]) -> Report:
        """One forward and one backward: `loss_of` gets the values, float32 [N] on the CPU and differentiable."""
        loss, report = loss_of(self._forward(rows).cpu())
        loss.backward()
        return report

    def discard(self) -> None:
        """Forget the gradient."""
        zero_gradients(self._masters)

    def update(self) -> Update:
        """Clip, step by the accumulated gradient if it is finite, and forget it."""
        optimizer = self._config.optimizer
        lr = learning_rate(optimizer, self._step, self._steps)
        norm = float(torch.nn.utils.clip_grad_norm_(list(self._masters.values()), optimizer.max_grad_norm))
        applied = math.isfinite(norm)
        if applied:
            self._rule.step(lr)
            self._step += 1
        self.discard()
        return Update(applied=applied, grad_norm=norm, lr=lr)

    def save(self, folder: Path) -> None:
        """Write everything that a later `load` needs to go on bit for bit, into a folder that is made. No pickle."""
        folder.mkdir()
        write_tensors(folder / _WEIGHTS_FILE, self._tensors())
        write_tensors(folder / _OPTIMIZER_FILE, self._rule.state())
        written = _Written(step=self._step, steps=self._steps)
        (folder / _STATE_FILE).write_bytes(msgspec.json.encode(written))

    def load(self, folder: Path) -> None:
        """Become what was saved. Raises CheckpointError."""
        try:
            written = msgspec.json.decode((folder / _STATE_FILE).read_bytes(), type=_Written)
            weights, optimizer = load_file(folder / _WEIGHTS_FILE), load_file(folder / _OPTIMIZER_FILE)
        except (OSError, SafetensorError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"the critic {folder} cannot be read: {error}; resume from an earlier one") from error
        copy_into(self._tensors(), weights, "the saved critic's weights")
        self._rule.restore(optimizer)
        self._step, self._steps = written.step, written.steps
        self.discard()

    def _tensors(self) -> dict[str, Tensor]:
        return dict(self._body) | {f"{_HEAD}.{name}": tensor for name, tensor in self._head.named_parameters()}

    def _forward(self, rows: PackedRows) -> Tensor:
        hidden = hidden_before_loss(self._model, rows, share_prefixes=self._share_prefixes)
        return self._head(hidden).squeeze(1)
