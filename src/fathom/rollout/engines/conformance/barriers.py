"""Order: who starts first, and barriers, whose results do not depend on who arrived first."""

from __future__ import annotations

import asyncio

from fathom.core.ports.engine import Barrier
from fathom.core.records.sampling import SamplingParams
from fathom.rollout.engines.conformance.subject import PROMPT, Case, Generated, Subject

_MEMBERS = 6


async def barriers_are_bitwise_repeatable(subject: Subject) -> None:
    """The same requests in any order of arrival, with others in between or not, give the same bits."""
    if not subject.engine.capabilities.barriers:
        return
    await subject.serve()
    one = await _barrier(subject, list(range(_MEMBERS)))
    await subject.run(subject.request(prompt=PROMPT, new=4))
    other = await _barrier(subject, [4, 1, 5, 0, 3, 2])
    for left, right in zip(one, other, strict=True):
        assert left.text == right.text
        assert left.logprobs.tobytes() == right.logprobs.tobytes()


async def barriers_wait_for_all(subject: Subject) -> None:
    """Nothing of a barrier starts before its last member has arrived; others pass."""
    if not subject.engine.capabilities.barriers:
        return
    await subject.serve()
    barrier = Barrier(name=subject.name(), size=2)
    first = asyncio.create_task(subject.run(subject.request(new=3, barrier=barrier)))
    while not (await subject.engine.status()).queued:
        await asyncio.sleep(0.01)
    await subject.run(subject.request(new=3))
    assert not first.done()
    await subject.run(subject.request(new=3, barrier=barrier))
    await first


async def many_may_be_in_flight(subject: Subject) -> None:
    """256 generations at once are all accepted and all served: no hidden cap on connections."""
    await subject.serve()
    version = (await subject.engine.status()).version
    barrier = Barrier(name=subject.name(), size=256)
    all_of_them = [subject.request(new=2, seed=seed, barrier=barrier) for seed in range(256)]
    if not subject.engine.capabilities.barriers:
        all_of_them = [subject.request(new=2, seed=seed) for seed in range(256)]
    done = await asyncio.gather(*(subject.run(each) for each in all_of_them))
    assert all(len(each.text) == 2 for each in done)
    assert version is not None
    assert {int(number) for each in done for number in each.policy_version} == {version.number}


async def _barrier(subject: Subject, arrival: list[int]) -> list[Generated]:
    """Members of one barrier, sent in this order; returned in the order of their names."""
    name = subject.name()
    barrier = Barrier(name=name, size=_MEMBERS)
    requests = [
        subject.request(
            name=f"{name}/m{member}",
            prompt=PROMPT if member < _MEMBERS // 2 else (*PROMPT, member),
            new=20 + member,
            seed=member,
            sampling=SamplingParams(temperature=0.8, top_k=12 if member % 2 else 0),
            barrier=barrier,
            priority=member % 3,
        )
        for member in range(_MEMBERS)
    ]
    tasks: dict[int, asyncio.Task[Generated]] = {}
    for member in arrival:
        tasks[member] = asyncio.create_task(subject.run(requests[member]))
        await asyncio.sleep(0.005)
    return list(await asyncio.gather(*(tasks[member] for member in sorted(tasks))))


BARRIER_CASES: tuple[Case, ...] = (
    barriers_are_bitwise_repeatable,
    barriers_wait_for_all,
    many_may_be_in_flight,
)
