"""The clock: how far training is, what the engines serve, and what that lets start and be trained.

Letters: v trainer's version (optimizer steps taken), p published version, h horizon: the version after the batch in
training (h = v while none is), G groups per step, b steps on a batch, e steps between publications, S and K the bounds
on age and KV age, s = min(S, K). A group that is *waiting* has started and is not yet part of a batch.

**Deadline.** A step that leaves version u trains tokens of age u - version. A group whose oldest token is w and whose
oldest KV is k may be trained by steps from u <= D = min(w + S, k + K). While it runs, D >= p_start + s, because
neither tokens nor KV of a group are older than the version that served when it started. (A record that claims older
ones loses those rows under every policy, and its group keeps the D it started with: a fault costs rows, not time.)

**The invariant** (kept by `may_start` and, under `wait`, by `may_take`). With the waiting groups in order of D:

    h + (j // G) * b + (b - 1) <= D_j        for j = 0, 1, ...

that is: trained in this order from h on, G at a time, each meets the last step on its batch in time.

- A start has D = p + s. `may_start` asks for the inequality at the last place n, behind all n waiting groups:
  (h - p) + (n // G) * b + (b - 1) <= s. Whoever the new group passes in the order has a later D and a place of at
  most n, so it meets its inequality too. With b = e = 1 this is the familiar floor(outstanding / G) <= S, where a
  batch in training stays outstanding until its update is published (h - p batches).
- A group that ends has a D at least as late as when it started; one that is given up lowers the places of others.
- `may_take` asks for the invariant of those that stay, at horizon v + b. A step without effect only lowers h.
- A publication raises p, and no D depends on a later p.

**No deadlock under `wait`.** Let nothing be in training and every due publication be made, so that h - p <= e - 1.
Running groups end by themselves. When none runs and n >= G wait, the first G may be taken: the group at place j of
the rest was at place j + G, and its old inequality is the one required. When n < G, one more may start, because
e - 1 + b - 1 <= s, which the config guarantees. When the data are exhausted, the rest is one last, smaller batch.
So no group is ever dropped for age, and the trainer never waits for ever. At s = 0 the same two rules are the
synchronous run: G groups start when v = p, and none until their update is published.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from fathom.config.trainer import StalenessConfig
from fathom.core.errors import BooksError


@final
class Clock:
    """Versions of one run. It starts with its version published: publish that version before the first start."""

    def __init__(
        self, *, groups_per_step: int, steps_on_a_batch: int, staleness: StalenessConfig, version: int = 0
    ) -> None:
        self.groups_per_step = groups_per_step
        self.steps_on_a_batch = steps_on_a_batch
        self._bound = staleness.max_staleness
        self._kv_bound = staleness.kv_bound
        self._publish_every = staleness.publish_every
        self._version = self._published = self._horizon = version
        self._in_training = False

    @property
    def version(self) -> int:
        """v: optimizer steps taken."""
        return self._version

    @property
    def published(self) -> int:
        """p: the version that the engines serve."""
        return self._published

    @property
    def training(self) -> bool:
        """True between `begin_batch` and `end_batch`."""
        return self._in_training

    @property
    def publication_due(self) -> bool:
        """True when the trainer is `publish_every` steps ahead of the engines."""
        return self._version - self._published >= self._publish_every

    def begin_batch(self) -> None:
        """A batch is handed to the trainer, which will take `steps_on_a_batch` steps on it."""
        if self._in_training:
            raise BooksError("a batch is in training already: settle it before the next one is taken")
        self._in_training = True
        self._horizon = self._version + self.steps_on_a_batch

    def step(self) -> None:
        """The weights changed: v becomes v + 1."""
        if not self._in_training or self._version == self._horizon:
            raise BooksError(f"a step from version {self._version} belongs to no batch in training")
        self._version += 1

    def end_batch(self) -> None:
        """Every step on the batch was taken, or had no effect."""
        self._in_training = False
        self._horizon = self._version

    def publish(self, version: int) -> None:
        """The engines serve `version` from now on. Numbers never go back, and none is published before it exists."""
        if not self._published <= version <= self._version:
            raise BooksError(
                f"version {version} cannot be published: {self._published} is, and the trainer is at {self._version}"
            )
        self._published = version

    def restore(self, version: int) -> None:
        """Resume at `version`, which is published first."""
        self._version = self._published = self._horizon = version
        self._in_training = False

    def deadline(self, oldest: int, oldest_kv: int) -> int:
        """D: the last version from which a step may train tokens this old."""
        return min(oldest + self._bound, oldest_kv + self._kv_bound)

    @property
    def start_deadline(self) -> int:
        """D of a group that starts now, before anything is known of its tokens."""
        return self.deadline(self._published, self._published)

    def meets(self, deadline: int) -> bool:
        """True when even the last step on a batch that is taken now keeps `deadline`."""
        return self._version + self.steps_on_a_batch - 1 <= deadline

    def may_start(self, waiting_groups: int) -> bool:
        """Admission: may a group start behind `waiting_groups` that run or are buffered?"""
        return self._trained_by(self._horizon, waiting_groups) <= self.start_deadline

    def may_take(self, other_deadlines: Iterable[int]) -> bool:
        """The rule of `wait`: may a batch be taken now while groups with these deadlines stay behind?"""
        horizon = self._version + self.steps_on_a_batch
        return all(self._trained_by(horizon, place) <= due for place, due in enumerate(sorted(other_deadlines)))

    def _trained_by(self, horizon: int, place: int) -> int:
        """Version before the last step on the batch of the group at `place`, when training goes on at `horizon`."""
        batches_before = place // self.groups_per_step
        return horizon + batches_before * self.steps_on_a_batch + self.steps_on_a_batch - 1
