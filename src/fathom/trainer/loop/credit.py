"""What the tokens of a batch are worth, where rewards of groups alone do not say it. Letters: N tokens with loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fathom.config.objective import ObjectiveConfig
from fathom.core.ids import TrajectoryId
from fathom.core.records.step import GroupBatch
from fathom.trainer.loop.candidate import Candidate
from fathom.trainer.objective.credit.assign import BatchTokens, assign_credit


def with_credit(
    config: ObjectiveConfig, groups: Sequence[GroupBatch], candidates: Sequence[Candidate], fresh: Sequence[int]
) -> list[Candidate]:
    """The candidates, those at `fresh` with advantages, and returns, of their own tokens.

    Only the rows at `fresh`, which are within the bounds before the first step on the batch, count in statistics.
    """
    if not fresh:
        return list(candidates)
    chosen = [candidates[index] for index in fresh]
    credit = assign_credit(config, groups, _batch_tokens(chosen))
    ends = np.cumsum([candidate.num_loss_tokens for candidate in chosen])[:-1]
    advantages = np.split(credit.advantages.numpy().astype(np.float32), ends)
    returns = None if credit.returns is None else np.split(credit.returns.numpy().astype(np.float32), ends)
    found = list(candidates)
    for number, index in enumerate(fresh):
        found[index] = replace(
            candidates[index],
            advantages=advantages[number],
            returns=None if returns is None else returns[number],
        )
    return found


def _batch_tokens(chosen: Sequence[Candidate]) -> BatchTokens:
    numbers: dict[TrajectoryId, int] = {}
    sequence = [numbers.setdefault(candidate.row.trajectory, len(numbers)) for candidate in chosen]
    counts = [candidate.num_loss_tokens for candidate in chosen]
    return BatchTokens(
        sequence=torch.from_numpy(np.repeat(np.array(sequence, np.int64), counts)),
        trajectories=tuple(numbers),
        place=torch.from_numpy(np.concatenate(_places(chosen))),
        truncated=torch.from_numpy(np.repeat(np.array([candidate.truncated for candidate in chosen]), counts)),
        logp_behaviour=torch.from_numpy(np.concatenate([candidate.row.logprobs for candidate in chosen])),
        logp_old=joined([candidate.old_logprobs for candidate in chosen]),
        logp_ref=joined([candidate.ref_logprobs for candidate in chosen]),
        values=joined([candidate.values for candidate in chosen]),
    )


def _places(chosen: Sequence[Candidate]) -> list[np.ndarray]:
    """int64 [N] for each row: places along its trajectory, the rows of which follow one another by branch."""
    ends: dict[TrajectoryId, int] = {}
    places: dict[int, np.ndarray] = {}
    for index in sorted(range(len(chosen)), key=lambda index: chosen[index].row.branch):
        row = chosen[index].row
        start = ends.get(row.trajectory, 0)
        ends[row.trajectory] = start + len(row.positions)
        places[index] = np.arange(start, ends[row.trajectory], dtype=np.int64)
    return [places[index] for index in range(len(chosen))]


def joined(columns: Sequence[np.ndarray | None]) -> torch.Tensor | None:
    """The rows' columns end to end. None: a row has none."""
    present = [column for column in columns if column is not None]
    return torch.from_numpy(np.concatenate(present)) if present and len(present) == len(columns) else None
