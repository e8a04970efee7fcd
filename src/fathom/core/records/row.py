"""Rows: the training sequences made from a trajectory. Letters: T tokens, N tokens with loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fathom.core.ids import GroupId, TrajectoryId
from fathom.core.records.bias import TokenBias
from fathom.core.records.sampling import SamplingParams
from fathom.core.records.scores import TeacherScores
from fathom.core.records.trajectory import KeptSets, TokenBranch, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training sequence. Arrays of length N hold only the tokens that have loss: masked ones cannot leak in."""

    trajectory: TrajectoryId
    """The trajectory it was made from."""
    group: GroupId
    """That trajectory's group."""
    branch: int
    """The branch of the trajectory."""
    token_ids: np.ndarray
    """int32 [T]: the whole sequence, context included."""
    positions: np.ndarray
    """int64 [N]: indices of the tokens with loss, ascending, each at least 1."""
    logprobs: np.ndarray
    """float32 [N]: behaviour log-probabilities."""
    policy_version: np.ndarray
    """int32 [N]: version numbers."""
    kv_version: np.ndarray
    """int32 [N]: oldest version numbers behind the KV read."""
    temperature: np.ndarray
    """float32 [N]: sampling temperature of each token."""
    kept: KeptSets | None
    """Kept sets of the N tokens. None: full vocabulary everywhere."""
    bias: TokenBias | None
    """Logit biases of the N tokens. None: no token has one."""
    routes: np.ndarray | None
    """uint8 or uint16 [T-1, L, E] expert ids of the tokens as inputs. None: not recorded."""
    mixed_routes: np.ndarray | None
    """bool [N]: routes before the token were recorded under an older version than its own. None: no routes."""
    teacher: TeacherScores | None = None
    """What a teacher says of the N tokens. None: none was asked, or none answered."""


def rows_of(trajectory: Trajectory) -> list[Row]:
    """The rows of a trajectory: each sampled token has loss in exactly one of them; branches without loss give none."""
    rows = (_row(trajectory, index, branch) for index, branch in enumerate(trajectory.payload.branches))
    return [row for row in rows if len(row.positions)]


def row_of_text(text: np.ndarray) -> Row:
    """A text, int32 [T], as a row to score: every token with a left context counts, at temperature 1."""
    count = len(text) - 1
    return Row(
        trajectory=TrajectoryId("text"),
        group=GroupId("text"),
        branch=0,
        token_ids=text,
        positions=np.arange(1, len(text), dtype=np.int64),
        logprobs=np.zeros(count, np.float32),
        policy_version=np.zeros(count, np.int32),
        kv_version=np.zeros(count, np.int32),
        temperature=np.ones(count, np.float32),
        kept=None,
        bias=None,
        routes=None,
        mixed_routes=None,
    )


def _row(trajectory: Trajectory, index: int, branch: TokenBranch) -> Row:
    positions = np.flatnonzero(branch.loss_mask)
    among_sampled = (np.cumsum(branch.sampled) - 1)[positions]
    sampling = [_sampling_at(branch, position) for position in positions.tolist()]
    return Row(
        trajectory=trajectory.header.id,
        group=trajectory.header.group,
        branch=index,
        token_ids=branch.token_ids,
        positions=positions,
        logprobs=branch.logprobs[among_sampled],
        policy_version=branch.policy_version[among_sampled],
        kv_version=branch.kv_version[among_sampled],
        temperature=np.array([each.temperature for each in sampling], dtype=np.float32),
        kept=branch.kept.select(among_sampled) if branch.kept is not None else None,
        bias=TokenBias.of([each.logit_bias for each in sampling]),
        routes=branch.routes,
        mixed_routes=branch.mixed_routes[among_sampled] if branch.routes is not None else None,
        teacher=branch.teacher,
    )


def _sampling_at(branch: TokenBranch, position: int) -> SamplingParams:
    return next(turn.sampling for turn in branch.turns if turn.start <= position < turn.end)
