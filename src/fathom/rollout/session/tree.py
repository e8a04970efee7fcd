"""The token tree of a session: every token once, with who made it; nothing is ever overwritten.

    prompt 0 ── turn 1 ── prompt 2 ── turn 3          a conversation
                    └──── prompt 4 ── turn 5          the same, gone on with in another way: a branch
    prompt 6 ── turn 7                                another conversation: a sub-agent, a compacted history

A node holds the tokens it adds to its parent's context. A *prompt* was rendered; a *turn* was sampled, and answers the
prompt it hangs on. Each path from a root to a leaf is one branch of the trajectory's record (`core/records`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import final

import numpy as np

from fathom.core.errors import RecordError
from fathom.core.ids import PolicyVersion
from fathom.core.records.message import Message
from fathom.core.records.trajectory import KeptSets, TokenBranch, TokenPayload
from fathom.rollout.sampled import Sampled


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """Tokens that were rendered. R of them, perhaps none."""

    parent: int | None
    """The turn whose context it extends. None: it begins with nothing."""
    token_ids: np.ndarray
    """int32 [R]."""
    messages: tuple[Message, ...]
    """What they say, beyond what the parent's context says."""
    length: int
    """Tokens of its context, its own included."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTurn:
    """Tokens that the policy sampled as the answer to a prompt."""

    parent: int
    """The prompt."""
    sampled: Sampled
    """The tokens, and all that is recorded of them."""
    message: Message | None
    """What the agent was told that they say. None: it was told nothing."""
    length: int
    """Tokens of its context, its own included."""


Node = Prompt | SampledTurn


@final
class TokenTree:
    """Nodes by number, parents first."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._prompts: dict[int | None, list[int]] = {}
        self._extended: set[int] = set()
        self._newest: tuple[int | None, np.ndarray] = (None, np.empty(0, np.int32))
        self.tokens = 0
        """Tokens of all nodes, each once."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, place: int) -> Node:
        return self._nodes[place]

    def add_prompt(self, parent: int | None, token_ids: np.ndarray, messages: Sequence[Message]) -> int:
        """A prompt that goes on from a turn, or from nothing; returns its place. `token_ids`: int32 [R].

        The same prompt at the same place is there once.

        Raises:
            RecordError: nothing is there to answer: no parent and no token.
        """
        if parent is not None and not isinstance(self._nodes[parent], SampledTurn):
            raise RecordError(f"a prompt goes on from a turn, and node {parent} is none")
        length = len(token_ids) + (self._nodes[parent].length if parent is not None else 0)
        if not length:
            raise RecordError("a prompt is empty; a model needs at least one token to go on from")
        for place in self._prompts.setdefault(parent, []):
            if np.array_equal(self.own_tokens(place), token_ids):
                return place
        self._prompts[parent].append(len(self._nodes))
        return self._add(Prompt(parent=parent, token_ids=token_ids, messages=tuple(messages), length=length))

    def add_turn(self, prompt: int, sampled: Sampled, message: Message | None) -> int:
        """An answer to a prompt; returns its place."""
        if not isinstance(self._nodes[prompt], Prompt):
            raise RecordError(f"a turn answers a prompt, and node {prompt} is none")
        length = self._nodes[prompt].length + len(sampled.token_ids)
        return self._add(SampledTurn(parent=prompt, sampled=sampled, message=message, length=length))

    def extend(self, turn: int) -> None:
        """The agent went on from this turn, be it in a context rendered anew: it was not abandoned."""
        self._extended.add(turn)

    def context(self, place: int) -> np.ndarray:
        """int32 [T], read-only: all tokens from the root to this node, its own included.

        The one asked for last is kept whole beside the nodes: the next turn of a long conversation adds to it.
        """
        known, context = self._newest
        parts: list[np.ndarray] = []
        at: int | None = place
        while at is not None and at != known:
            node = self._nodes[at]
            parts.append(_token_ids(node))
            at = node.parent
        parts += [context] if at is not None else []
        parts.reverse()
        context = np.concatenate(parts, dtype=np.int32)
        context.flags.writeable = False
        self._newest = place, context
        return context

    def own_tokens(self, place: int) -> np.ndarray:
        """int32: the tokens that this node adds."""
        return _token_ids(self._nodes[place])

    def routed(self, place: int | None) -> int:
        """Tokens from the root to this node whose expert routes are recorded, from the first on without a gap."""
        if place is None:
            return 0
        return max((node.sampled.routed for _, node in self._path(place) if isinstance(node, SampledTurn)), default=0)

    def messages(self, place: int) -> tuple[Message, ...]:
        """The conversation from the root to this node."""
        said: list[Message] = []
        for _, node in self._path(place):
            said += node.messages if isinstance(node, Prompt) else [node.message] if node.message else []
        return tuple(said)

    @property
    def turns(self) -> tuple[int, ...]:
        """Places of all turns, in the order in which they ended."""
        return tuple(place for place, node in enumerate(self._nodes) if isinstance(node, SampledTurn))

    @property
    def end(self) -> int | None:
        """The turn that ended last. None: there is none."""
        return self.turns[-1] if self.turns else None

    def payload(self, rewarded: Set[int] = frozenset()) -> TokenPayload:
        """The record of all of it: one branch for each leaf.

        A turn is trained in the first branch that holds it, and is context in the others. One that nobody went on from
        is trained only if it is the end, or among `rewarded`: else it was abandoned.

        Raises:
            RecordError: the parts contradict each other, or there are none.
        """
        if not self._nodes:
            raise RecordError("nothing was asked of the model")
        trained = self._extended | {self.end} | rewarded
        parents = {node.parent for node in self._nodes}
        leaves = [place for place in range(len(self._nodes)) if place not in parents]
        branches: list[TokenBranch] = []
        seen: dict[int, int] = {}
        for leaf in leaves:
            path = list(self._path(leaf))
            shared = [place for place, _ in path if place in seen]
            parent = seen[shared[-1]] if shared else None
            branches.append(_branch(path, parent, self._nodes[shared[-1]].length if shared else 0, trained))
            seen |= {place: len(branches) - 1 for place, _ in path if place not in seen}
        return TokenPayload(versions=_versions(self._nodes), branches=tuple(branches))

    def _add(self, node: Node) -> int:
        self._nodes.append(node)
        self.tokens += len(_token_ids(node))
        return len(self._nodes) - 1

    def _path(self, place: int) -> Iterator[tuple[int, Node]]:
        """From the root to the node."""
        backwards: list[tuple[int, Node]] = []
        at: int | None = place
        while at is not None:
            backwards.append((at, self._nodes[at]))
            at = self._nodes[at].parent
        return reversed(backwards)


def _token_ids(node: Node) -> np.ndarray:
    return node.token_ids if isinstance(node, Prompt) else node.sampled.token_ids


def _branch(
    path: Sequence[tuple[int, Node]], parent: int | None, shared_prefix: int, trained: Set[int | None]
) -> TokenBranch:
    """The record of one path. Its first `shared_prefix` tokens were trained, if at all, in branch `parent`."""
    token_ids = np.concatenate([_token_ids(node) for _, node in path], dtype=np.int32)
    turns = [(place, node) for place, node in path if isinstance(node, SampledTurn)]
    sampled, loss_mask = np.zeros(len(token_ids), bool), np.zeros(len(token_ids), bool)
    for place, node in turns:
        mine = slice(node.length - len(node.sampled.token_ids), node.length)
        sampled[mine] = True
        loss_mask[mine] = place in trained and node.length > shared_prefix
    parts = [node.sampled for _, node in turns]
    return TokenBranch(
        parent=parent,
        shared_prefix=shared_prefix,
        token_ids=token_ids,
        sampled=sampled,
        loss_mask=loss_mask,
        logprobs=_joined([part.logprobs for part in parts], np.float32),
        policy_version=_joined([part.policy_version for part in parts], np.int32),
        kv_version=_joined([part.kv_version for part in parts], np.int32),
        turns=tuple(node.sampled.turn_at(node.length - len(node.sampled.token_ids)) for _, node in turns),
        kept=_joined_kept(parts),
        raw_logprobs=_joined_raw(parts),
        routes=_joined_routes(parts, len(token_ids) - 1),
    )


def _versions(nodes: Sequence[Node]) -> tuple[PolicyVersion, ...]:
    found: dict[int, PolicyVersion] = {}
    for node in nodes:
        for version in node.sampled.versions if isinstance(node, SampledTurn) else ():
            if found.setdefault(version.number, version) != version:
                raise RecordError("one version number with two digests or incarnations")
    return tuple(found[number] for number in sorted(found))


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([*parts, np.empty(0, dtype)], dtype=dtype)


def _joined_raw(parts: Sequence[Sampled]) -> np.ndarray | None:
    raw = [part.raw_logprobs for part in parts]
    if not raw or any(each is None for each in raw):
        return None
    return _joined([each for each in raw if each is not None], np.float32)


def _joined_kept(parts: Sequence[Sampled]) -> KeptSets | None:
    """Kept sets of all sampled tokens; those of a turn that removed nothing are full."""
    if all(part.kept is None for part in parts):
        return None
    lengths = [
        np.zeros(len(part.token_ids), np.int64) if part.kept is None else np.diff(part.kept.offsets) for part in parts
    ]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    return KeptSets(offsets=offsets, ids=_joined([part.kept.ids for part in parts if part.kept is not None], np.int32))


def _joined_routes(parts: Sequence[Sampled], expected: int) -> np.ndarray | None:
    """[expected, L, E]. A branch that ends in a prompt, or holds a turn without routes, has none."""
    routes = [part.routes for part in parts if part.routes is not None]
    if not routes or len(routes) != len(parts) or sum(map(len, routes)) != expected:
        return None
    return np.concatenate(routes)
