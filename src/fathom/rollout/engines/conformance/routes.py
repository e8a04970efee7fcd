"""Expert routes: every input once, as it becomes known, whatever the cache and updates do. A dense engine has none."""

from __future__ import annotations

import asyncio

import numpy as np

from fathom.core.records.sampling import InFlightMode
from fathom.rollout.engines.conformance.subject import PROMPT, Case, Generated, Subject


async def routes_come_with_the_tokens(subject: Subject) -> None:
    """The prompt's with the first token, then one for each token more; and the tokens are the same without them."""
    if not subject.engine.capabilities.routes:
        return
    await subject.serve()
    done = await subject.run(subject.request(seed=2, routes=True))
    plain = await subject.run(subject.request(seed=2))
    routes = _routes(done)
    assert done.text == plain.text
    assert plain.routes is None
    assert len(routes) == len(done.context) - 1
    assert routes.dtype in (np.uint8, np.uint16)
    ordered = np.sort(routes, axis=-1)
    assert not np.any(ordered[..., 1:] == ordered[..., :-1]), "an expert is chosen once"


async def cached_tokens_keep_their_routes(subject: Subject) -> None:
    """Whoever finds a prompt's KV gets the routes that were recorded when it was computed."""
    if not subject.engine.capabilities.routes:
        return
    await subject.serve()
    prompt = PROMPT * 5
    without = await subject.run(subject.request(prompt=prompt, seed=1))
    first = await subject.run(subject.request(prompt=prompt, seed=1, routes=True))
    group = await asyncio.gather(
        *(subject.run(subject.request(prompt=prompt, seed=seed, routes=True)) for seed in range(4))
    )
    longer = await subject.run(subject.request(prompt=(*first.context.tolist(), 5, 6), routes=True))
    assert without.end.cached_tokens == first.end.cached_tokens == 0
    for done in (*group, longer):
        cached = done.end.cached_tokens
        assert cached >= len(prompt) - 1
        assert np.array_equal(_routes(done)[: len(prompt) - 1], _routes(first)[: len(prompt) - 1])
    known = min(longer.end.cached_tokens, len(first.context) - 1)
    assert np.array_equal(_routes(longer)[:known], _routes(first)[:known])


async def an_update_leaves_recorded_routes_alone(subject: Subject) -> None:
    """Coverage stays complete in every mode; what was sent is not sent again."""
    if not subject.engine.capabilities.routes:
        return
    await subject.serve()
    for mode in sorted(subject.engine.capabilities.in_flight):
        manifest = await subject.prepare()
        running = await subject.begin(subject.request(new=96, routes=True))
        await subject.engine.commit(manifest.version, mode)
        done = await running.finish()
        assert len(_routes(done)) == len(done.context) - 1
        if mode is not InFlightMode.DRAIN:
            assert len(set(done.policy_version.tolist())) == 2


def _routes(done: Generated) -> np.ndarray:
    assert done.routes is not None
    return done.routes


ROUTE_CASES: tuple[Case, ...] = (
    routes_come_with_the_tokens,
    cached_tokens_keep_their_routes,
    an_update_leaves_recorded_routes_alone,
)
