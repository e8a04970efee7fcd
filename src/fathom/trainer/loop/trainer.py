"""The optimizer steps on a batch. Letters: N tokens with loss.

rows of a batch ─ old pass? ─ advantages ─┬─ step: remove over-age rows ─ plan ─ micro-batches ─ update ─ outcome
                                          └─ step: ... (`steps_on_a_batch` of them, each row in one)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from fathom.config.distillation import DistillationConfig
from fathom.config.families import KlPlacement, Proximal
from fathom.config.objective import ObjectiveConfig
from fathom.config.objectives.declaration import RecordField
from fathom.config.trainer import StalenessConfig, TrainerConfig
from fathom.core.errors import BooksError, ConfigError, StepStoppedError
from fathom.core.records.row import Row
from fathom.core.records.step import StepOutcome, TrainBatch
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.port import Backend, Update
from fathom.trainer.backends.prefixes import PrefixOrder
from fathom.trainer.loop.candidate import Candidate, candidates_of
from fathom.trainer.loop.credit import joined, with_credit
from fathom.trainer.loop.outcome import step_outcome
from fathom.trainer.loop.packing import micro_batches, mini_batches
from fathom.trainer.loop.tally import Tally, row_places
from fathom.trainer.loop.taught import taught_tokens, with_distillation, with_teachers
from fathom.trainer.objective.credit.assign import by_token
from fathom.trainer.objective.credit.value_loss import ValueSums, value_micro_batch_loss
from fathom.trainer.objective.objective import LossSums, micro_batch_loss
from fathom.trainer.objective.outputs import TokenOutputs
from fathom.trainer.objective.plan import (
    Gate,
    StepPlan,
    StepTokens,
    needs_now_pass,
    needs_old_pass,
    prepare_step,
)
from fathom.trainer.objective.policy_loss import loglinear_blend

Stop = Callable[[], bool]
"""True: stop as soon as possible. Asked before every forward and every backward."""


def never() -> bool:
    """A stop flag that is never raised."""
    return False


@final
class Trainer:
    """Turns batches into steps of a backend. Synchronous; the same inputs give the same bits.

    A step either happens whole or not at all: whatever is raised inside it, weights and optimizer are those of before.
    """

    def __init__(
        self,
        backend: Backend,
        config: TrainerConfig,
        objective: ObjectiveConfig,
        staleness: StalenessConfig,
        distillation: DistillationConfig | None = None,
    ) -> None:
        self._backend = backend
        self._config = config
        self._objective = objective
        self._staleness = staleness
        self._distillation = distillation
        self._reference: str | None = None  # digest of the reference that the rows at hand were scored with
        self._replayed = backend.experts if config.replay_routes else None
        if config.replay_routes and self._replayed is None:
            raise ConfigError("trainer.replay_routes = true needs a model with experts; turn it off")
        self._critic = backend.critic if RecordField.VALUES in objective.declaration.needs else None
        if self._critic is None and RecordField.VALUES in objective.declaration.needs:
            raise ConfigError(f"objective.kind = '{objective.kind}' needs a critic: add [trainer.critic]")

    @property
    def version(self) -> int:
        """Optimizer steps behind the weights."""
        return self._backend.step

    def begin(self) -> None:
        """RL starts here: version 0, a fresh optimizer, and the current weights as the KL reference if there is a KL.

        A critic starts from the current weights too. Not for a resumed run: there `backend.load` brings all of it back.
        """
        self._backend.begin_phase(self._config.optimizer, self._config.steps)
        if self._objective.reference:
            self._backend.keep_reference()
        if self._critic is not None:
            self._critic.begin(self._backend.whole()[0], self._config.steps)

    def steps(self, batch: TrainBatch, version: int, stop: Stop = never) -> Iterator[StepOutcome]:
        """Train on a batch: `steps_on_a_batch` optimizer steps, one outcome after each.

        Its rows are split into as many parts, trajectories whole, and each part is trained once. The weights between
        two outcomes are those of the first one's version, so they can be published. A step without a token in the
        gradient, or with a gradient that is not finite, leaves weights, optimizer and version as they are.

        Args:
            batch: the batch.
            version: the clock's version, which must be that of the weights.
            stop: raise this flag to end early.

        Raises:
            BooksError: the clock and the weights disagree.
            RecordError: a row has no reward, or a token comes from a version not yet made.
            StepStoppedError: `stop` said so. Steps that had an outcome stay taken.
        """
        if version != self.version:
            raise BooksError(f"the clock says version {version}, the weights are those of version {self.version}")
        started = time.perf_counter()
        candidates = candidates_of(batch, self._objective.advantage, version, self._replayed)
        candidates = with_teachers(self._distillation, self._before_the_first_step(batch, candidates, stop))
        lengths, owners = [c.length for c in candidates], [c.row.trajectory for c in candidates]
        for number, part in enumerate(mini_batches(lengths, owners, self._config.steps_on_a_batch)):
            yield self._step([candidates[index] for index in part], stop, started, first=number == 0)
            started = time.perf_counter()

    def logprobs(self, rows: Sequence[Row], stop: Stop = never) -> list[np.ndarray]:
        """float32 [N] for each row: log-probabilities of its tokens with loss under the current weights.

        Routes are the live routers': this is what an engine that scores is compared with.
        """
        return self._score(rows, self._backend.logprobs, stop)

    def _before_the_first_step(self, batch: TrainBatch, candidates: Sequence[Candidate], stop: Stop) -> list[Candidate]:
        """Give the candidates all that is taken from the weights before the first step on the batch."""
        found, fresh = list(candidates), self._fresh(candidates)
        rows = [candidates[i].row for i in fresh]
        if needs_old_pass(self._objective, self._config.steps_on_a_batch):
            for i, old in zip(fresh, self._score(rows, self._backend.logprobs, stop, replay=True), strict=True):
                found[i] = replace(found[i], old_logprobs=old)
        self._reference = self._backend.reference_digest if self._objective.reference else None
        if self._objective.reference and self._objective.kl_placement is KlPlacement.REWARD:
            for i, ref in zip(fresh, self._score(rows, self._backend.reference_logprobs, stop), strict=True):
                found[i] = replace(found[i], ref_logprobs=ref)
        if self._critic is not None:
            for i, values in zip(fresh, self._score(rows, self._critic.values, stop), strict=True):
                found[i] = replace(found[i], values=values)
        return with_credit(self._objective, batch.groups, found, fresh) if by_token(self._objective) else found

    def _step(self, candidates: Sequence[Candidate], stop: Stop, started: float, *, first: bool) -> StepOutcome:
        version, tally = self.version, Tally(candidates)
        try:
            self._accumulate(candidates, tally, stop, first=first)
        except BaseException:  # raised again: the gradient of half a step must not reach the next one
            self._discard()
            raise
        update, critic_update = self._update(tally, version)
        outcome = step_outcome(
            version=version,
            candidates=candidates,
            tally=tally,
            update=update,
            critic_update=critic_update,
            objective=self._objective,
            reference=self._reference,
            step_s=time.perf_counter() - started,
        )
        return with_distillation(self._distillation, candidates, tally.sums, outcome)

    def _update(self, tally: Tally, version: int) -> tuple[Update | None, Update | None]:
        """What policy and critic did. The critic steps only where the policy's step counts."""
        if not tally.sums.tokens:
            self._discard()
            return None, None
        critic = self._critic
        update = self._backend.update(hold=critic is not None and version < critic.warmup_steps)
        if critic is None:
            return update, None
        if not update.applied:
            critic.discard()
            return update, None
        return update, critic.update()

    def _discard(self) -> None:
        self._backend.discard()
        if self._critic is not None:
            self._critic.discard()

    def _accumulate(self, candidates: Sequence[Candidate], tally: Tally, stop: Stop, *, first: bool) -> None:
        """Forward and backward over the rows within the bounds, micro-batch by micro-batch."""
        fresh = self._fresh(candidates)
        if not fresh:
            return
        trained = [candidates[i] for i in fresh]
        in_step, in_plan = [tally.places[i] for i in fresh], row_places(trained)
        plan = prepare_step(self._objective, self._step_tokens(trained, stop, first=first))
        if plan.tokens.logp_ref is not None:
            tally.add_reference(fresh, plan.tokens.logp_ref)
        entropy = self._objective.entropy_coefficient > 0
        for batch in self._cut([candidate.row for candidate in trained]):
            _check(stop)
            packed = PackedRows.of_rows([trained[i].row for i in batch], forced=self._replayed is not None)
            share = plan.take(torch.from_numpy(np.r_[tuple(in_plan[i] for i in batch)]))
            report, routing = self._backend.accumulate(packed, self._loss_of(share, stop), entropy=entropy)
            index = np.r_[tuple(in_step[i] for i in batch)]
            tally.add(index, report.old_logprobs, report.gate, report.sums)
            if routing is not None:
                tally.add_routes(index, packed, routing)
            if self._critic is not None:
                tally.add_values(self._critic.accumulate(packed, self._value_loss_of(share, stop)))

    def _fresh(self, candidates: Sequence[Candidate]) -> list[int]:
        """Indices of the rows that are within the bounds at the current version and have what they need."""
        return [
            i
            for i, candidate in enumerate(candidates)
            if candidate.routable and candidate.taught and not candidate.over_age(self.version, self._staleness)
        ]

    def _step_tokens(self, fresh: Sequence[Candidate], stop: Stop, *, first: bool) -> StepTokens:
        objective, rows = self._objective, [candidate.row for candidate in fresh]
        numbers: dict[str, int] = {}
        sequence = [numbers.setdefault(row.trajectory, len(numbers)) for row in rows]
        counts = np.array([candidate.num_loss_tokens for candidate in fresh])
        old = joined([candidate.old_logprobs for candidate in fresh])
        now = old if needs_now_pass(objective) else None
        if now is not None and not first:
            now = joined(self._score(rows, self._backend.logprobs, stop, replay=True))
        reference = joined([candidate.ref_logprobs for candidate in fresh])
        if objective.reference and objective.kl_placement is KlPlacement.LOSS:
            reference = joined(self._score(rows, self._backend.reference_logprobs, stop))
            self._reference = self._backend.reference_digest
        blend: Tensor | None = None
        if objective.proximal is Proximal.LOGLINEAR:
            versions = torch.from_numpy(np.concatenate([row.policy_version for row in rows]))
            blend = loglinear_blend(versions, self.version).to(torch.float32)
        return StepTokens(
            sequence=torch.from_numpy(np.repeat(np.array(sequence, np.int64), counts)),
            sequences=len(numbers),
            advantage=torch.from_numpy(np.concatenate([candidate.token_advantages for candidate in fresh])),
            truncated=torch.from_numpy(np.repeat(np.array([c.truncated for c in fresh]), counts)),
            logp_behaviour=torch.from_numpy(np.concatenate([row.logprobs for row in rows])),
            logp_old=old,
            logp_now=now,
            logp_ref=reference,
            blend=blend,
            values=joined([candidate.values for candidate in fresh]),
            returns=joined([candidate.returns for candidate in fresh]),
            taught=taught_tokens(self._distillation, rows),
        )

    def _loss_of(self, share: StepPlan, stop: Stop) -> Callable[[TokenOutputs], tuple[Tensor, _Report]]:
        def loss_of(outputs: TokenOutputs) -> tuple[Tensor, _Report]:
            _check(stop)
            terms = micro_batch_loss(self._objective, share, outputs)
            old = share.tokens.logp_old if share.tokens.logp_old is not None else outputs.logprobs.detach()
            return terms.loss, _Report(old_logprobs=old, gate=terms.gate, sums=terms.sums)

        return loss_of

    def _value_loss_of(self, share: StepPlan, stop: Stop) -> Callable[[Tensor], tuple[Tensor, ValueSums]]:
        def loss_of(values: Tensor) -> tuple[Tensor, ValueSums]:
            _check(stop)
            return value_micro_batch_loss(self._objective, share, values)

        return loss_of

    def _score(
        self, rows: Sequence[Row], score: Callable[[PackedRows], Tensor], stop: Stop, *, replay: bool = False
    ) -> list[np.ndarray]:
        """float32 [N] for each row, by micro-batches. `replay`: by their routes, where those are replayed at all."""
        scored: dict[int, np.ndarray] = {}
        for batch in self._cut(rows):
            _check(stop)
            packed = PackedRows.of_rows([rows[i] for i in batch], forced=replay and self._replayed is not None)
            scored.update(zip(batch, packed.split(score(packed).numpy()), strict=True))
        return [scored[i] for i in range(len(rows))]

    def _cut(self, rows: Sequence[Row]) -> list[list[int]]:
        lengths, owners = [len(row.token_ids) for row in rows], [row.trajectory for row in rows]
        shared = self._config.share_prefixes and all(row.routes is None for row in rows)
        prefixes = PrefixOrder.of([row.token_ids[: row.positions[-1]] for row in rows]) if shared else None
        return micro_batches(lengths, owners, self._config.tokens_per_micro_batch, prefixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What a micro-batch tells of its tokens."""

    old_logprobs: Tensor
    """float32 [n]: before the first step on the batch."""
    gate: Gate
    """What became of them."""
    sums: LossSums
    """Sums over them."""


def _check(stop: Stop) -> None:
    if stop():
        raise StepStoppedError("stopped within a step; its rows were not trained and can be trained again")
