"""What of an ATIF document can be trained, as supervised data.

    prompt of the first call   its answer   what the next prompt adds   its answer ...
    no loss                    loss         no loss                     loss

A row is made of token ids alone; text is never encoded again. Each prompt has to go on from all that was sent and
sampled before it, token by token. Where one does not (the history was compacted, or text was tokenised anew) there is
no row in which every trained token has the left context that it was sampled in, and the document is refused.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from fathom.core.errors import DataError
from fathom.core.records.demonstration import Demonstration
from fathom.text.atif.document import Document, Metrics, Step


def demonstrations_of(document: Document, source: str) -> tuple[Demonstration, ...]:
    """One row of the document, and one of each sub-agent's.

    Steps that are copied context are not trained; those that no model made are not either.

    Args:
        document: what happened.
        source: where it came from, for people.

    Raises:
        DataError: it makes no row. Names the step and why.
    """
    return tuple(_row(each, _name(each, document, source)) for each in document.with_subagents)


def _row(document: Document, source: str) -> Demonstration:
    token_ids: list[int] = []
    trained: list[bool] = []
    before: Step | None = None
    for step in document.steps:
        if step.source != "agent" or step.llm_call_count == 0 or step.is_copied_context:
            continue
        prompt, completion = _tokens(step, source)
        if prompt[: len(token_ids)] != token_ids:
            _refuse_break(before, step, token_ids, prompt, source)
        trained += [False] * (len(prompt) - len(token_ids)) + [True] * len(completion)
        token_ids = [*prompt, *completion]
        before = step
    if not any(trained):
        raise DataError(f"{source}: no step of the agent is left to be trained (copied context is not)")
    return Demonstration(token_ids=np.array(token_ids, np.int32), loss_mask=np.array(trained, bool), source=source)


def _tokens(step: Step, source: str) -> tuple[list[int], list[int]]:
    """Prompt and answer of the one call of a step."""
    metrics = step.metrics or Metrics()
    if step.llm_call_count not in (None, 1):
        raise DataError(
            f"{source}: step {step.step_id} holds {step.llm_call_count} calls of the model; a row needs each"
        )
    if metrics.prompt_token_ids is None or metrics.completion_token_ids is None:
        raise DataError(
            f"{source}: step {step.step_id} of the agent has no token ids; rows are made of prompt_token_ids and "
            "completion_token_ids (if no model made it, it says so by llm_call_count 0)"
        )
    if not metrics.prompt_token_ids:
        raise DataError(f"{source}: step {step.step_id} has an empty prompt; a sampled token needs a left context")
    return metrics.prompt_token_ids, metrics.completion_token_ids


def _refuse_break(before: Step | None, step: Step, token_ids: list[int], prompt: list[int], source: str) -> NoReturn:
    assert before is not None, "the first prompt goes on from nothing"
    place = next((at for at, (one, other) in enumerate(zip(token_ids, prompt, strict=False)) if one != other), None)
    where = f"it has only {len(prompt)} tokens" if place is None else f"it differs at token {place}"
    raise DataError(
        f"{source}: the prompt of step {step.step_id} does not go on from the {len(token_ids)} tokens sent and "
        f"sampled until step {before.step_id} ({where}), so the two make no row; train them as documents of their own, "
        "the steps before as copied context"
    )


def _name(document: Document, root: Document, source: str) -> str:
    return source if document is root else f"{source}, sub-agent {document.trajectory_id}"
