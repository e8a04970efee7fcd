"""Guesses by a small model of the same vocabulary.

It draws with the request's own distribution and uniforms, as the large model does: where their distributions agree,
so do their tokens, also at high temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self, final

import numpy as np
import torch

from fathom.core.errors import ConfigError
from fathom.core.ports.engine import GenerateRequest
from fathom.model.language_model import LanguageModel
from fathom.model.paged_attention import PAGE_TOKENS, KvPages
from fathom.rollout.engines.embedded.server.decode.sampler import draw
from fathom.rollout.engines.uniforms import uniforms
from fathom.text.tokenizer import Tokenizer


@final
class ModelProposer:
    """See `Proposer`. Its weights stay what they are; every slot has pages of its own."""

    def __init__(self, model: LanguageModel, *, slots: int, max_tokens: int, step_tokens: int) -> None:
        """`step_tokens` of contexts that it has not seen are computed at once, at most."""
        width = -(-max_tokens // PAGE_TOKENS)
        self._model = model
        self._kv = KvPages(model.shape, pages=slots * width, dtype=model.dtype, device=model.device)
        self._tables = np.arange(slots * width).reshape(slots, width)
        self._seen = np.zeros((slots, max_tokens), np.int32)
        """Tokens whose KV lies in the pages; drafts that were wrong among them."""
        self._computed = np.zeros(slots, np.int64)
        self._requests: dict[int, GenerateRequest] = {}
        self._step_tokens = step_tokens

    @classmethod
    def load(
        cls, folder: Path, large: LanguageModel, large_folder: Path, *, slots: int, max_tokens: int, step_tokens: int
    ) -> Self:
        """The model in `folder` as the one that drafts for `large`; for the rest see the constructor.

        Raises:
            ConfigError: it cannot be loaded, or is not of the same vocabulary, or was made for shorter contexts.
        """
        small = LanguageModel.load(folder, large.dtype, str(large.device))
        sizes = small.shape.vocab_size, large.shape.vocab_size
        if sizes[0] != sizes[1]:
            raise _refusal(folder, f"its vocabulary has {sizes[0]} tokens, that of {large_folder} {sizes[1]}")
        if all((each / "tokenizer.json").is_file() for each in (folder, large_folder)):
            ours, theirs = Tokenizer.load(large_folder).vocabulary, Tokenizer.load(folder).vocabulary
            if ours != theirs:
                token = min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
                raise _refusal(folder, f"token {token!r} has another id than in {large_folder}")
        if small.shape.max_positions < max_tokens:
            raise _refusal(
                folder, f"it was made for {small.shape.max_positions} tokens, a context may have {max_tokens}"
            )
        return cls(small, slots=slots, max_tokens=max_tokens, step_tokens=step_tokens)

    def open(self, slot: int, request: GenerateRequest) -> None:
        """See `Proposer.open`."""
        self._computed[slot] = 0
        self._requests[slot] = request

    def propose(self, slots: Sequence[int], contexts: Sequence[np.ndarray], most: Sequence[int]) -> list[np.ndarray]:
        """See `Proposer.propose`. There is no guess while a context has not been computed to its end."""
        for slot, context in zip(slots, contexts, strict=True):
            self._computed[slot] = self._common(slot, context)
        lengths = np.array([len(context) for context in contexts])
        lacking = lengths - self._computed[list(slots)]
        taken = np.clip(self._step_tokens - (np.cumsum(lacking) - lacking), 0, lacking)
        drafts: list[list[int]] = [[] for _ in slots]
        going = np.flatnonzero(taken).tolist()
        new = {index: contexts[index][lengths[index] - lacking[index] :][: taken[index]] for index in going}
        while going:
            drawn = self._draw([slots[index] for index in going], [new[index] for index in going])
            for index, token in zip(going, drawn.tolist(), strict=True):
                if taken[index] == lacking[index]:
                    drafts[index].append(token)
                    new[index] = np.array([token], np.int32)
            going = [index for index in going if 0 < len(drafts[index]) < most[index]]
        return [np.array(tokens, np.int32) for tokens in drafts]

    def _common(self, slot: int, context: np.ndarray) -> int:
        """Leading tokens that need not be computed again. The last one is: its logits are needed."""
        known = min(int(self._computed[slot]), len(context) - 1)
        differs = self._seen[slot, :known] != context[:known]
        return int(differs.argmax()) if differs.any() else known

    def _draw(self, slots: Sequence[int], new: Sequence[np.ndarray]) -> np.ndarray:
        """Compute new tokens of each slot; int64 [B]: the token drawn after the last of them."""
        starts, lengths = self._computed[list(slots)], np.array([len(tokens) for tokens in new])
        for slot, start, tokens in zip(slots, starts.tolist(), new, strict=True):
            self._seen[slot, start : start + len(tokens)] = tokens
            self._computed[slot] += len(tokens)
        positions = np.concatenate([np.arange(*span) for span in zip(starts, starts + lengths, strict=True)])
        ids = torch.from_numpy(np.concatenate(new).astype(np.int64)).to(self._model.device)
        hidden = self._model.hidden(
            ids,
            torch.from_numpy(positions).to(self._model.device),
            self._kv.plan(self._tables[list(slots)], starts, lengths),
        )
        logits = self._model.logits(hidden[torch.from_numpy(np.cumsum(lengths) - 1).to(hidden.device)])
        requests = [self._requests[slot] for slot in slots]
        seeds = np.array([request.seed for request in requests], np.uint64)
        drawn = draw(logits, [each.sampling for each in requests], uniforms(seeds, starts + lengths), raw=False)
        return np.minimum(drawn.token_ids, self._model.shape.vocab_size - 1)  # NaN may give any place


def _refusal(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"engine.draft_model = '{folder}' cannot draft: {reason}; give a model of the same family, or set "
        "engine.speculation = 'ngram'"
    )
