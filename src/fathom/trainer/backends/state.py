"""What a checkpoint of the trainer holds on disk: a Hugging Face model folder, safetensors, and a few words of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fathom.core.errors import CheckpointError

MODEL_FOLDER = "model"
"""The cast weights in Hugging Face layout: what was published."""
_STATE_FILE = "trainer.json"
_MASTERS_FILE = "masters.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
_REFERENCE_FILE = "reference.safetensors"
_AVERAGES_FILE = "reference_averages.safetensors"


class _Written(msgspec.Struct, frozen=True, tag="trainer_state.1", forbid_unknown_fields=True):
    """The words of JSON. Written last: without it a checkpoint is not whole."""

    step: int
    """Updates applied in the phase."""
    has_masters: bool
    """False: the model's own tensors are the masters."""
    has_reference: bool
    """True: the KL reference lies beside them."""
    has_averages: bool = False
    """True: the reference is an average, and its float32 numbers lie beside it."""
    held: int = 0
    """Updates of these that left the policy as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What is beside the model in a checkpoint. The learning rate is a function of `step` and needs no state."""

    step: int
    """Updates applied in the phase."""
    masters: Mapping[str, Tensor] | None
    """float32 masters by name. None: the model's own tensors are the masters."""
    optimizer: Mapping[str, Tensor]
    """Moments and counts. Empty: no update was applied yet."""
    reference: Mapping[str, Tensor] | None
    """The KL reference's cast weights. None: no reference is kept."""
    averages: Mapping[str, Tensor] | None
    """float32 averages behind the reference's weights. None: there are none."""
    held: int
    """Updates of these that left the policy as it was: only a critic was trained."""


def write_state(folder: Path, state: TrainerState) -> None:
    """Write `state` into an existing folder."""
    if state.masters is not None:
        write_tensors(folder / _MASTERS_FILE, state.masters)
    if state.reference is not None:
        write_tensors(folder / _REFERENCE_FILE, state.reference)
    if state.averages is not None:
        write_tensors(folder / _AVERAGES_FILE, state.averages)
    write_tensors(folder / _OPTIMIZER_FILE, state.optimizer)
    written = _Written(
        step=state.step,
        has_masters=state.masters is not None,
        has_reference=state.reference is not None,
        has_averages=state.averages is not None,
        held=state.held,
    )
    (folder / _STATE_FILE).write_bytes(msgspec.json.encode(written))


def read_state(folder: Path) -> TrainerState:
    """Read what `write_state` wrote. Raises CheckpointError: the folder is missing, incomplete or damaged."""
    try:
        written = msgspec.json.decode((folder / _STATE_FILE).read_bytes(), type=_Written)
        state = TrainerState(
            step=written.step,
            masters=load_file(folder / _MASTERS_FILE) if written.has_masters else None,
            optimizer=load_file(folder / _OPTIMIZER_FILE),
            reference=load_file(folder / _REFERENCE_FILE) if written.has_reference else None,
            averages=load_file(folder / _AVERAGES_FILE) if written.has_averages else None,
            held=written.held,
        )
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}; resume from an earlier one") from error
    if (state.step > state.held) is not bool(state.optimizer):
        raise CheckpointError(f"checkpoint {folder} has lost its optimizer state; resume from an earlier one")
    return state


def copy_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor], origin: str) -> None:
    """Overwrite `targets` in place.

    Raises:
        CheckpointError: names, shapes or dtypes differ. Nothing is changed then.
    """
    wrong = sorted(targets.keys() ^ values.keys())
    wrong += [
        name
        for name in targets.keys() & values.keys()
        if (targets[name].shape, targets[name].dtype) != (values[name].shape, values[name].dtype)
    ]
    if wrong:
        raise CheckpointError(f"{origin} do not fit the model: {wrong[:5]}; resume with the config the run began with")
    for name, target in targets.items():
        target.detach().copy_(values[name])


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
