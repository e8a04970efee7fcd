"""On-policy distillation (`algorithms.md` D.8). Letters: N tokens with loss, K ids compared at them, V vocabulary.

The student sampled; d = log student - log teacher of the same id, under the same temperature, bias and kept set.

Sampled token: E[d] over the student's own tokens is KL(student || teacher), and its policy gradient has -d as the
advantage of the token. So it is taken off the advantage, detached, after the base estimator (whitening included, which
would change lambda) and before the policy ratio:

    A <- A - lambda (log student - log teacher)

The student's number is the trainer's before the first step on the batch (`logp_old`): the ratio and the correction's
weight lead from the behaviour policy to that policy, so it is its distance to the teacher that counts. The behaviour
log-probabilities would add the engine's mismatch and staleness to it.

Ids: at each token sum over a set of w d, an exact sum in place of the sample. Every id carries -w d as its advantage:

    value  sum w d        gradient  sum (w d) grad log student

which over the whole vocabulary, weighted by the student's probability, is value and gradient of KL(student || teacher)
itself, and which the sampled token estimates. The derivative of the truncated sum as it stands is another thing: it
takes mass away from the set however right it is, and, weighted by the teacher, pushes down what the teacher likes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from fathom.config.distillation import DistillationConfig
from fathom.config.families import DistillationForm, IdSet, IdWeight


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTokens:
    """The ids at which students and teachers are compared, token by token. Nothing has a gradient."""

    offsets: torch.Tensor
    """Int64 [N+1]: token n has the ids from `offsets[n]` to `offsets[n+1]`."""
    logp_teacher: torch.Tensor
    """[K]: the teacher's log-probabilities."""
    of_student: torch.Tensor
    """Bool [K]: among the student's likeliest."""
    of_teacher: torch.Tensor
    """Bool [K]: among the teacher's likeliest."""

    def __post_init__(self) -> None:
        ids = int(self.offsets[-1])
        if any(column.shape != (ids,) for column in (self.logp_teacher, self.of_student, self.of_teacher)):
            raise ValueError(f"columns beside {ids} ids have other lengths")

    def places(self, index: torch.Tensor) -> torch.Tensor:
        """Int64 [k]: where the ids of the tokens at int64 [n] `index` are, token after token."""
        lengths = self.offsets.diff()[index]
        ends = lengths.cumsum(0)
        shift = (self.offsets[:-1][index] - (ends - lengths)).repeat_interleave(lengths)
        return shift + torch.arange(len(shift), device=shift.device)

    def take(self, index: torch.Tensor) -> ComparedTokens:
        """Those of the tokens at `index`, int64 [n]."""
        lengths, places = self.offsets.diff()[index], self.places(index)
        return ComparedTokens(
            offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            logp_teacher=self.logp_teacher[places],
            of_student=self.of_student[places],
            of_teacher=self.of_teacher[places],
        )

    @property
    def tokens(self) -> torch.Tensor:
        """Int64 [K]: the token of each id."""
        lengths = self.offsets.diff()
        return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)


def reverse_kl(logp_student: torch.Tensor, logp_teacher: torch.Tensor) -> torch.Tensor:
    """[N] d at the sampled tokens: their mean estimates KL(student || teacher), and can be negative."""
    return logp_student - logp_teacher


def distilled_advantage(
    advantage: torch.Tensor, logp_old: torch.Tensor, logp_teacher: torch.Tensor, coefficient: float
) -> torch.Tensor:
    """[N] A - lambda d, without gradient. Alone, with no task's reward, A is 0."""
    return (advantage - coefficient * reverse_kl(logp_old, logp_teacher)).detach()


SETS: dict[IdSet, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    IdSet.ONLY_STUDENT: lambda of_student, of_teacher: of_student,
    IdSet.ONLY_TEACHER: lambda of_student, of_teacher: of_teacher,
    IdSet.INTERSECTION: torch.logical_and,
    IdSet.UNION: torch.logical_or,
    IdSet.XOR: torch.logical_xor,
}
"""Each gives bool [K], the ids compared, from whose likeliest they are."""

WEIGHTS: dict[IdWeight, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    IdWeight.STUDENT_P: lambda logp_student, logp_teacher: logp_student,
    IdWeight.TEACHER_P: lambda logp_student, logp_teacher: logp_teacher,
    IdWeight.NONE: lambda logp_student, logp_teacher: torch.zeros_like(logp_student),
}
"""Each gives [K], the log of the weights before they are made to sum to 1."""


def compare(
    ids: IdSet, weight: IdWeight, logp_student: torch.Tensor, compared: ComparedTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over the compared ids at each token.

    Args:
        ids: which ids.
        weight: how they are weighted. The weights of a token sum to 1, but for `IdSet.XOR`, where they are the
            probabilities themselves (or 1). They are constants.
        logp_student: [K] the student's log-probabilities, with gradient.
        compared: the teacher's.

    Returns:
        [N] sums with the gradient above, and 0 where a token has no id to compare; bool [N], tokens that have one.
    """
    chosen = SETS[ids](compared.of_student, compared.of_teacher).nonzero().squeeze(1)
    student, teacher, token = logp_student[chosen], compared.logp_teacher[chosen], compared.tokens[chosen]
    count = len(compared.offsets) - 1
    with torch.no_grad():
        difference = student - teacher
        log_weight = WEIGHTS[weight](student, teacher)
        if ids is not IdSet.XOR:
            log_weight = log_weight - _log_mass(log_weight, token, count)[token]
        share = log_weight.exp() * difference
    nothing = logp_student.new_zeros(count)
    value = nothing.index_add(0, token, share)
    slope = nothing.index_add(0, token, share * (student - student.detach()))
    return value + slope, torch.bincount(token, minlength=count) > 0


def compared_loss(
    config: DistillationConfig, logp_student: torch.Tensor, compared: ComparedTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """`compare` as the config says: over the whole vocabulary it is KL(student || teacher)."""
    if config.form is DistillationForm.FULL_VOCABULARY:
        return compare(IdSet.ONLY_TEACHER, IdWeight.STUDENT_P, logp_student, compared)
    return compare(config.set, config.weight, logp_student, compared)


def _log_mass(log_weight: torch.Tensor, token: torch.Tensor, count: int) -> torch.Tensor:
    """[N] log of the sum of the weights of each token; 0 where it has none."""
    largest = log_weight.new_full((count,), -torch.inf).scatter_reduce(0, token, log_weight, "amax")
    largest = torch.where(largest.isneginf(), torch.zeros_like(largest), largest)
    mass = log_weight.new_zeros(count).index_add(0, token, (log_weight - largest[token]).exp())
    return largest + torch.where(mass > 0, mass, torch.ones_like(mass)).log()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtTokens:
    """What teachers say of the tokens with loss of an optimizer step, or of some of them. Nothing has a gradient."""

    config: DistillationConfig
    """What is made of it."""
    logp_teacher: torch.Tensor
    """[N]: the teacher's log-probability of each token."""
    compared: ComparedTokens | None = None
    """More ids at each of the N tokens. None: only the sampled tokens are compared."""

    def __post_init__(self) -> None:
        if (self.config.form is DistillationForm.SAMPLED_TOKEN) != (self.compared is None):
            raise ValueError(f"distillation.form = '{self.config.form}' and the ids compared do not go together")
        if self.compared is not None and len(self.compared.offsets) != len(self.logp_teacher) + 1:
            raise ValueError(f"ids of {len(self.compared.offsets) - 1} beside {len(self.logp_teacher)} tokens")

    def take(self, index: torch.Tensor) -> TaughtTokens:
        """Those of the tokens at `index`, int64 [n]."""
        compared = None if self.compared is None else self.compared.take(index)
        return TaughtTokens(config=self.config, logp_teacher=self.logp_teacher[index], compared=compared)

    def advantage(self, base: torch.Tensor, logp_old: torch.Tensor) -> torch.Tensor:
        """[N] advantages of the policy loss; where ids are compared, the base alone."""
        if self.compared is not None:
            return base
        return distilled_advantage(base, logp_old, self.logp_teacher, self.config.coefficient)

    def finite(self, logp_ids: torch.Tensor | None) -> torch.Tensor:
        """[N]: 0 where all ids of a token have finite log-probabilities under the student, else what is not finite."""
        nothing = torch.zeros_like(self.logp_teacher)
        if self.compared is None:
            return nothing
        ids = self._ids(logp_ids).detach().to(nothing.dtype)
        return nothing.index_add(0, self.compared.tokens, ids * 0)

    def terms(self, logp_ids: torch.Tensor | None, kept: torch.Tensor) -> torch.Tensor | None:
        """[n], with gradient: the sum over the compared ids at each of the tokens at int64 [n] `kept`, which alone
        enter any arithmetic. None: no ids are compared."""
        if self.compared is None:
            return None
        sums, _ = compared_loss(self.config, self._ids(logp_ids)[self.compared.places(kept)], self.compared.take(kept))
        return sums

    def _ids(self, logp_ids: torch.Tensor | None) -> torch.Tensor:
        assert self.compared is not None, "asked only where there are ids"
        if logp_ids is None or logp_ids.shape != self.compared.logp_teacher.shape:
            raise ValueError("ids are compared with a teacher, and the forward does not say how likely they are")
        return logp_ids
