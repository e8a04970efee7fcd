"""What a run checks and prepares where an agent acts: its options, and the model's chat template taken apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from fathom.config.run import RunConfig
from fathom.core.errors import ConfigError
from fathom.text.chat.reading.readers import TurnReaders
from fathom.text.chat.renderer import TurnRenderer
from fathom.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnText:
    """How the model's conversations are written and read."""

    renderer: TurnRenderer
    """Messages to ids."""
    readers: TurnReaders
    """Ids to answers."""
    tokenizer: Tokenizer
    """What the ids mean."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Probe the template. Raises ConfigError when there is none, or none that can write a conversation."""
        renderer = TurnRenderer(tokenizer)
        properties = renderer.properties
        readers = TurnReaders(tokenizer, properties.calls, properties.thoughts)
        return cls(renderer=renderer, readers=readers, tokenizer=tokenizer)


def check_agent_options(config: RunConfig) -> None:
    """Refuse what has no meaning where an agent acts. Raises ConfigError."""
    for reason in _refusals(config):
        raise ConfigError(f"in task.kind = {config.task.kind!r} an agent acts: {reason}")


def check_single_turn_options(config: RunConfig) -> None:
    """Refuse what has a meaning only where an agent acts. Raises ConfigError."""
    for option, given in (("[task.limits]", config.task.limits), ("[rollout.agent]", config.rollout.agent)):
        if given is not None:
            raise ConfigError(
                f"{option} is for tasks in which an agent acts, and task.kind = {config.task.kind!r} is single-turn; "
                "remove it"
            )


def _refusals(config: RunConfig) -> Iterator[str]:
    if config.deterministic:
        yield (
            "when it asks depends on its own speed, so deterministic = true cannot hold; remove it "
            "(staleness.max_staleness = 0 is possible without it)"
        )
    given = {"grader_workers", "grade_timeout_s"} & config.task.model_fields_set
    if given:
        yield f"each episode grades in its own process; replace {', '.join(sorted(given))} by [task.limits] grade_s"
    if config.rollout.stop_strings:
        yield "it says what stops an answer; remove rollout.stop_strings"
    if not config.model.chat_template:
        yield "its conversation is written by the model's chat template; remove model.chat_template = false"
