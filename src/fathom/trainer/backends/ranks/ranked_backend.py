"""A backend over several processes. Letters: N tokens with loss of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from fathom.config.trainer import OptimizerConfig
from fathom.core.adapter import AdapterIdentity, MergeRounding
from fathom.core.errors import ConfigError
from fathom.model.routing import ExpertShape, Routing
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.port import Backend, Report, Update
from fathom.trainer.backends.ranks.ranked_critic import RankedCritic
from fathom.trainer.backends.ranks.ranks import Ranks
from fathom.trainer.objective.outputs import TokenOutputs


@final
class RankedBackend:
    """See `port.Backend`: data parallelism for any objective.

    Every process runs the same trainer on the same batches. Of each micro-batch it computes its own rows; the numbers
    of their tokens, a few bytes each, are exchanged, so that the objective sees all N of them, and with them the
    denominators, ratios of trajectories and gates of the whole step. It differentiates with respect to its own. The
    gradients are added up once before an optimizer step, never averaged: that is the gradient of one process.
    """

    def __init__(self, backend: Backend, ranks: Ranks) -> None:
        """`backend` holds the same weights in every process. Raises FathomError when it does not."""
        self._backend = backend
        self._ranks = ranks
        ranks.refuse_different(backend.weights())
        self._critic = None if backend.critic is None else RankedCritic(backend.critic, ranks)

    @property
    def step(self) -> int:
        """See `port.Backend`."""
        return self._backend.step

    @property
    def adapter(self) -> AdapterIdentity | None:
        """See `port.Backend`."""
        return self._backend.adapter

    @property
    def experts(self) -> ExpertShape | None:
        """See `port.Backend`."""
        return self._backend.experts

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """See `port.Backend`."""
        return self._backend.masters

    @property
    def critic(self) -> RankedCritic | None:
        """See `port.Backend`."""
        return self._critic

    @property
    def reference_digest(self) -> str | None:
        """See `port.Backend`."""
        return self._backend.reference_digest

    def begin_phase(self, optimizer: OptimizerConfig, steps: int) -> None:
        """See `port.Backend`."""
        self._backend.begin_phase(optimizer, steps)

    def logprobs(self, rows: PackedRows) -> Tensor:
        """See `port.Backend`."""
        return scored(self._ranks, rows, self._backend.logprobs)

    def reference_logprobs(self, rows: PackedRows) -> Tensor:
        """See `port.Backend`."""
        return scored(self._ranks, rows, self._backend.reference_logprobs)

    def accumulate(
        self,
        rows: PackedRows,
        loss_of: Callable[[TokenOutputs], tuple[Tensor, Report]],
        *,
        entropy: bool = False,
    ) -> tuple[Report, Routing | None]:
        """See `port.Backend`.

        Raises:
            ConfigError: the rows have routes, or ids to be compared with a teacher: both are of one process.
        """
        if rows.routes is not None:
            raise ConfigError("routes are not compared by several trainer processes; set rollout.record_routes = false")
        if rows.compared is not None:
            raise ConfigError("several trainer processes distil by sampled tokens alone; set distillation.form so")
        mine = self._ranks.share(rows.lengths)
        places, total = rows.places(mine), len(rows.targets)

        def whole(outputs: TokenOutputs) -> TokenOutputs:
            complete = self._ranks.complete
            return TokenOutputs(
                logprobs=complete(outputs.logprobs, places, total),
                entropy=None if outputs.entropy is None else complete(outputs.entropy, places, total),
            )

        if not mine:
            nothing = torch.zeros(0)
            _, report = loss_of(whole(TokenOutputs(logprobs=nothing, entropy=nothing if entropy else None)))
            return report, None
        return self._backend.accumulate(rows.take(mine), lambda outputs: loss_of(whole(outputs)), entropy=entropy)

    def discard(self) -> None:
        """See `port.Backend`."""
        self._backend.discard()

    def update(self, *, hold: bool = False) -> Update:
        """See `port.Backend`."""
        self._ranks.add_up_gradients(self._backend.masters)
        return self._backend.update(hold=hold)

    def weights(self) -> Mapping[str, Tensor]:
        """See `port.Backend`."""
        return self._backend.weights()

    def whole(self) -> tuple[Mapping[str, Tensor], MergeRounding | None]:
        """See `port.Backend`."""
        return self._backend.whole()

    def keep_reference(self) -> None:
        """See `port.Backend`."""
        self._backend.keep_reference()

    def save(self, folder: Path) -> None:
        """See `port.Backend`. One process writes; none returns before it has."""
        if self._ranks.rank == 0:
            self._backend.save(folder)
        self._ranks.add_up(torch.zeros(1))

    def load(self, folder: Path) -> None:
        """See `port.Backend`."""
        self._backend.load(folder)
        self._ranks.refuse_different(self._backend.weights())


def scored(ranks: Ranks, rows: PackedRows, score: Callable[[PackedRows], Tensor]) -> Tensor:
    """float32 [N]: `score` of all rows, each computed by one process."""
    mine = ranks.share(rows.lengths)
    own = score(rows.take(mine)) if mine else torch.zeros(0)
    return ranks.complete(own, rows.places(mine), len(rows.targets))
