"""A trajectory of the ledger as ATIF documents, one for each branch of its token tree.

The record keeps tokens, not messages: ids, log-probabilities and cached tokens are exact, and what they say is read
from them. What was rendered before an answer is what came back for the calls of the answer before it, or else the
user's word. A branch repeats turns of the one that it left. A turn that has its loss in another branch, or was
abandoned, is copied context: whoever trains on all documents trains each sampled token once, as the run does.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from fathom.core.ids import TrajectoryId
from fathom.core.records.message import Message
from fathom.core.records.trajectory import Graded, TokenBranch, Trajectory, Turn
from fathom.evidence.atif.words import Words
from fathom.ledger.entries import StoredTrajectory
from fathom.text.atif.document import Agent, Call, Document, FinalMetrics, Metrics, Observation, Result, Step

_VERSION = "ATIF-v1.7"
"""The oldest that has all fields used here."""
_MALFORMED = "malformed_arguments"
_NOTES = (
    "Token ids are as sent and sampled; messages were read from them. Copied context has its loss elsewhere, or none."
)


def documents_of(stored: StoredTrajectory, run: str, words: Words) -> list[Document]:
    """One for each branch; none where nothing was asked of the model.

    Args:
        stored: the trajectory.
        run: what its run is called.
        words: reads ids.
    """
    return [_document(stored, index, run, words) for index in range(len(stored.trajectory.payload.branches))]


def file_name(trajectory: TrajectoryId, branch: int) -> str:
    """What to call the file of a document."""
    return f"{trajectory.replace('/', '_')}.b{branch}.json"


def _document(stored: StoredTrajectory, index: int, run: str, words: Words) -> Document:
    trajectory = stored.trajectory
    branch = trajectory.payload.branches[index]
    steps = list(_steps(trajectory, index, words))
    metrics = [step.metrics for step in steps if step.metrics is not None]
    return Document(
        schema_version=_VERSION,
        session_id=trajectory.header.id,
        trajectory_id=f"{trajectory.header.id}/b{index}",
        agent=Agent(name="fathom", version=version("fathom-rl"), model_name=run),
        steps=steps,
        notes=_NOTES,
        final_metrics=FinalMetrics(
            total_prompt_tokens=sum(each.prompt_tokens or 0 for each in metrics),
            total_completion_tokens=sum(each.completion_tokens or 0 for each in metrics),
            total_cached_tokens=sum(each.cached_tokens or 0 for each in metrics),
            total_steps=len(steps),
        ),
        extra=_facts(stored, branch),
    )


def _facts(stored: StoredTrajectory, branch: TokenBranch) -> dict[str, Any]:
    """What a run knows beyond the format."""
    header = stored.trajectory.header
    reward = header.reward
    graded = (
        {"reward": reward.total, "reward_components": reward.components, "grader": reward.grader}
        if isinstance(reward, Graded)
        else {"reward": None, "ungraded": reward.cause}
    )
    return {
        "task": header.task,
        "group": header.group,
        "status": header.status.value,
        "cause": header.cause,
        **graded,
        "tokenizer": header.tokenizer.tokenizer,
        "template": header.tokenizer.template,
        "policy_versions": {each.name: each.digest for each in stored.trajectory.payload.versions},
        "shared_prefix": branch.shared_prefix,
        "content_hash": stored.entry.content_hash,
    }


def _steps(trajectory: Trajectory, index: int, words: Words) -> Iterator[Step]:
    branch = trajectory.payload.branches[index]
    names = {each.number: each.name for each in trajectory.payload.versions}
    number, done = 1, 0
    said: tuple[Turn, Message] | None = None  # a turn waits for what came back
    for turn in branch.turns:
        rendered = words.rendered(branch.token_ids[done : turn.start].tolist())
        if said is not None:
            calls = bool(said[1].tool_calls)
            yield _agent_step(branch, *said, number, rendered if calls else None, names)
            number += 1
        if said is None or not said[1].tool_calls:
            yield Step(step_id=number, source="user", message=rendered)
            number += 1
        ids = branch.token_ids[turn.start : turn.end].tolist()
        said = (turn, words.answer(ids, turn.finish_reason, f"{trajectory.header.id}/{turn.start}"))
        done = turn.end
    if said is not None:
        yield _agent_step(branch, *said, number, None, names)


def _agent_step(
    branch: TokenBranch, turn: Turn, message: Message, place: int, came_back: str | None, names: dict[int, str]
) -> Step:
    before, count = int(branch.sampled[: turn.start].sum()), turn.end - turn.start
    mine = slice(before, before + count)
    calls = [
        Call(
            tool_call_id=call.id,
            function_name=call.name,
            arguments=call.parsed if call.parsed is not None else {_MALFORMED: call.arguments},
        )
        for call in message.tool_calls
    ]
    answers = calls[0].tool_call_id if len(calls) == 1 else None
    results = None if came_back is None else Observation(results=[Result(source_call_id=answers, content=came_back)])
    trained = bool(branch.loss_mask[turn.start : turn.end].any())
    versions = [names[number] for number in dict.fromkeys(branch.policy_version[mine].tolist())]
    return Step(
        step_id=place,
        source="agent",
        message=message.content,
        reasoning_content=message.reasoning or None,
        tool_calls=calls or None,
        observation=results,
        is_copied_context=None if trained else True,
        llm_call_count=1,
        metrics=Metrics(
            prompt_tokens=turn.start,
            completion_tokens=count,
            cached_tokens=turn.cached_tokens,
            prompt_token_ids=branch.token_ids[: turn.start].tolist(),
            completion_token_ids=branch.token_ids[turn.start : turn.end].tolist(),
            logprobs=branch.logprobs[mine].tolist(),
            extra={"policy_versions": versions, "engine": turn.engine, "finish_reason": turn.finish_reason.value},
        ),
    )
