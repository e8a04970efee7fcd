"""What the loop asks of a backend, whatever it computes with and on however many devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from fathom.config.trainer import OptimizerConfig
from fathom.core.adapter import AdapterIdentity, MergeRounding
from fathom.model.routing import ExpertShape, Routing
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.objective.outputs import TokenOutputs

Report = TypeVar("Report")
"""What a loss has to tell beside its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What an update did."""

    applied: bool
    """False: the gradient was not finite; weights and optimizer are unchanged."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate; 0 where the weights were held."""


class Backend(Protocol):
    """A policy under training. Letters: N tokens with loss of a packed forward.

    A phase (the supervised warm start, or RL) has its own optimizer and its own step counter. Gradients of `accumulate`
    add up until `update` or `discard` consumes them.
    """

    @property
    def step(self) -> int:
        """Updates applied in this phase."""
        ...

    @property
    def adapter(self) -> AdapterIdentity | None:
        """The adapter that is trained, saved and loaded, and whose tensors `weights` are. None: the whole model is."""
        ...

    @property
    def experts(self) -> ExpertShape | None:
        """How many experts the model has. None: a dense one."""
        ...

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """float32 tensors that updates move, by name; each has a gradient allocated. With a float32 forward they are
        the parameters themselves."""
        ...

    def begin_phase(self, optimizer: OptimizerConfig, steps: int) -> None:
        """Start a phase of `steps` planned updates: counter 0, fresh moments, no gradient."""
        ...

    def logprobs(self, rows: PackedRows) -> Tensor:
        """float32 [N] on the CPU: log-probabilities under the current weights, by forced routes if the rows say so."""
        ...

    def accumulate(
        self,
        rows: PackedRows,
        loss_of: Callable[[TokenOutputs], tuple[Tensor, Report]],
        *,
        entropy: bool = False,
    ) -> tuple[Report, Routing | None]:
        """One forward and one backward.

        `loss_of` gets the log-probabilities, float32 [N] on the CPU and differentiable, and returns a scalar, whose
        gradient is added, and whatever it has to report, which is returned. With it comes what the routers chose by
        themselves, where the rows have routes to compare it with.

        `entropy`: it also gets the entropy at each token, with its gradient.
        """
        ...

    def discard(self) -> None:
        """Forget the gradient."""
        ...

    def update(self, *, hold: bool = False) -> Update:
        """Clip, step by the accumulated gradient if it is finite, and forget it.

        `hold`: count the step and leave weights and optimizer as they are; the learning-rate schedule waits.
        """
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The cast tensors that the forward uses and that are published, live, by canonical name."""
        ...

    def whole(self) -> tuple[Mapping[str, Tensor], MergeRounding | None]:
        """The whole model's weights in the same cast, good until the next call, and what rounding lost where an
        adapter was merged into them. None: there is no adapter, they are `weights`."""
        ...

    @property
    def critic(self) -> Critic | None:
        """The value model, saved and loaded with the policy. None: none is configured."""
        ...

    @property
    def reference_digest(self) -> str | None:
        """Root digest (hex) of the KL reference as it is now. None: none is kept."""
        ...

    def keep_reference(self) -> None:
        """The current weights become the KL reference; updates move it from here as `trainer.reference` says."""
        ...

    def reference_logprobs(self, rows: PackedRows) -> Tensor:
        """float32 [N] on the CPU: log-probabilities under the reference. Never between a forward and its backward."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything that a later `load` needs to go on bit for bit. No pickle."""
        ...

    def load(self, folder: Path) -> None:
        """Become what was saved. Raises CheckpointError."""
        ...


class Critic(Protocol):
    """A value model under training beside the policy. Letters: N tokens with loss of a packed forward.

    The value of a token is that of the context before it: what the model makes of the token's left neighbour. Its
    optimizer and its gradient are its own; the backend saves and loads it with the policy.
    """

    @property
    def warmup_steps(self) -> int:
        """First steps that train the critic alone: the policy is held."""
        ...

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """float32 tensors that updates move, by name; each has a gradient allocated."""
        ...

    def begin(self, weights: Mapping[str, Tensor], steps: int) -> None:
        """Start over from a policy's weights with `steps` planned updates: all values are 0."""
        ...

    def values(self, rows: PackedRows) -> Tensor:
        """float32 [N] on the CPU: values under the current weights, without gradient."""
        ...

    def accumulate(self, rows: PackedRows, loss_of: Callable[[Tensor], tuple[Tensor, Report]]) -> Report:
        """One forward and one backward. `loss_of` gets the values, float32 [N] on the CPU and differentiable."""
        ...

    def discard(self) -> None:
        """Forget the gradient."""
        ...

    def update(self) -> Update:
        """Clip, step by the accumulated gradient if it is finite, and forget it."""
        ...
