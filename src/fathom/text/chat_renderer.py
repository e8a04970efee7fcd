"""From messages to token ids, in the same way for rollouts and for demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from blake3 import blake3

from fathom.core.errors import ConfigError, DataError
from fathom.core.ports.environment import ChatMessage
from fathom.core.records.demonstration import Demonstration
from fathom.core.records.trajectory import TokenizerIdentity
from fathom.text.chat_template import FAULTS, compile_template
from fathom.text.tokenizer import Tokenizer

_PROBE = "fathom"
"""An answer whose end can be found again in rendered text."""


@final
class ChatRenderer:
    """Renders prompts and demonstrations. Letters: P prompt tokens, A answer tokens.

    With a template the ids are those of its text, opened for the assistant's answer, and nothing else: the template
    alone decides on a beginning-of-sequence token. Without one they are what the tokenizer puts in front of plain text
    (such a token, or nothing) and the ids of the messages' contents, joined. So there is never a second one.
    """

    def __init__(self, tokenizer: Tokenizer, *, use_template: bool) -> None:
        """Raises ConfigError when a template is asked for and there is none, or none that compiles."""
        source = tokenizer.template if use_template else ""
        if source is None:
            raise ConfigError("the model folder has no chat template; set model.chat_template = false")
        self._tokenizer = tokenizer
        self._template = compile_template(source) if use_template else None
        self.identity = TokenizerIdentity(tokenizer=tokenizer.digest, template=blake3(source.encode()).hexdigest())
        """What the ids of rendered prompts mean."""

    def render_prompt(self, messages: Sequence[ChatMessage]) -> np.ndarray:
        """int32 [P], P at least 1.

        Raises:
            DataError: the template refuses the conversation, the tokenizer a character, or nothing is left to send.
        """
        if self._template is None:
            front = self._tokenizer.special.bos_id
            ids = [] if front is None else [front]
            ids += self._tokenizer.encode("".join(message["content"] for message in messages))
        else:
            ids = self._tokenizer.encode(self._render(messages, open_answer=True))
        if not ids:
            raise DataError("a prompt is empty; a model needs at least one token to go on from")
        return np.array(ids, dtype=np.int32)

    def render_demonstration(self, messages: Sequence[ChatMessage], answer: str, source: str) -> Demonstration:
        """A prompt, exactly as a rollout would be sent it, and an answer to imitate, with the token that ends it.

        The ids are joined; nothing is encoded across the seam, as nothing is when the answer is sampled.

        Raises:
            DataError: as `render_prompt`.
            ConfigError: no token is known to end an answer.
        """
        prompt = self.render_prompt(messages)
        target = np.array([*self._tokenizer.encode(answer), self.end_id()], dtype=np.int32)
        return Demonstration(
            token_ids=np.concatenate([prompt, target]),
            loss_mask=np.arange(len(prompt) + len(target)) >= len(prompt),
            source=source,
        )

    def end_id(self) -> int:
        """The stop id that ends an answer: the one the template puts behind it, else the tokenizer's end of sequence.

        Raises:
            ConfigError: there is none.
        """
        special = self._tokenizer.special
        if self._template is not None:
            turns: list[ChatMessage] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
            closing = self._render(turns, open_answer=False).rpartition(_PROBE)[2]
            behind = self._tokenizer.encode(closing)[:1]
            if behind and behind[0] in special.stop_ids:
                return behind[0]
        if special.eos_id is None:
            raise ConfigError("the tokenizer names no eos_token, so a demonstration cannot show where an answer ends")
        return special.eos_id

    def _render(self, messages: Sequence[ChatMessage], *, open_answer: bool) -> str:
        assert self._template is not None
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=open_answer,
                **self._tokenizer.special.texts,
            )
        except FAULTS as error:
            roles = [message["role"] for message in messages]
            said = str(error) or type(error).__name__
            raise DataError(f"the chat template refuses a conversation with roles {roles}: {said}") from error
