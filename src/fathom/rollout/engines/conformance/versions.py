"""Versions: stage, verify, commit at a token boundary, roll back; and what running generations make of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import msgspec
import numpy as np

from fathom.core.errors import EngineError, EngineRefusedError, PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest
from fathom.core.records.sampling import FinishReason, InFlightMode
from fathom.rollout.engines.conformance.subject import PROMPT, Case, Generated, Subject

_LONG = 150


async def continue_keeps_the_context(subject: Subject) -> None:
    """The version of tokens switches once, at the commit; their KV stays as old as it is, and says so."""
    before, after, done = await _across_a_commit(subject, InFlightMode.CONTINUE)
    assert _switches(done, before, after)
    assert set(done.kv_version.tolist()) == {before.number}
    assert done.end.finish_reason is FinishReason.LENGTH


async def recompute_renews_the_context(subject: Subject) -> None:
    """After the commit, tokens read KV of the new version only: they are those of a fresh request on that context."""
    before, after, done = await _across_a_commit(subject, InFlightMode.RECOMPUTE)
    assert _switches(done, before, after)
    assert np.array_equal(done.kv_version, done.policy_version)
    cut = int(np.argmax(done.policy_version == after.number))
    context = tuple(done.context[: len(PROMPT) + cut].tolist())
    fresh = await subject.run(subject.request(prompt=context, new=_LONG - cut, seed=done.request.seed))
    assert fresh.text == done.text[cut:]
    np.testing.assert_allclose(fresh.logprobs, done.logprobs[cut:], atol=subject.tolerance)


async def drain_finishes_what_runs(subject: Subject) -> None:
    """Running generations end under the old version before the commit; one that arrives meanwhile gets the new one."""
    before = await subject.serve()
    after = (await subject.prepare()).version
    running = await subject.begin(subject.request(new=_LONG))
    old = asyncio.create_task(running.finish())
    commit = asyncio.create_task(subject.engine.commit(after, InFlightMode.DRAIN))
    await asyncio.sleep(0.02)
    new = asyncio.create_task(subject.run(subject.request(new=4)))
    await commit
    assert set((await old).policy_version.tolist()) == {before.number}
    assert set((await new).policy_version.tolist()) == {after.number}


async def a_withdrawn_drain_changes_nothing(subject: Subject) -> None:
    """A rollback during a drain ends the commit with an error; the old version goes on, and admits again."""
    before = await subject.serve()
    after = (await subject.prepare()).version
    running = await subject.begin(subject.request(new=_LONG))
    commit = asyncio.create_task(subject.engine.commit(after, InFlightMode.DRAIN))
    await asyncio.sleep(0.02)
    await subject.engine.rollback()
    old = await running.finish()
    if commit.done() and commit.exception() is None:
        return  # so fast an engine had finished the generation before
    await _complaint(commit)
    assert (await subject.engine.status()).version == before
    assert set(old.policy_version.tolist()) == {before.number}
    assert set((await subject.run(subject.request(new=2))).policy_version.tolist()) == {before.number}


async def prefixes_end_with_their_version(subject: Subject) -> None:
    """A prompt computed under the old version is not read by a new request, or the tokens say so."""
    prompt = PROMPT * 4
    await subject.serve()
    await subject.run(subject.request(prompt=prompt, seed=0))
    version = await subject.serve()
    done = await subject.run(subject.request(prompt=prompt, seed=0))
    if set(done.kv_version.tolist()) == {version.number}:
        assert done.end.cached_tokens == 0
    else:
        assert subject.engine.capabilities.kv_versions


async def versions_differ(subject: Subject) -> None:
    """A commit really changes the weights: the same request gets other probabilities, and scores follow."""
    await subject.serve()
    one = await subject.run(subject.request(seed=1))
    await subject.serve()
    other = await subject.run(subject.request(seed=1))
    assert one.text != other.text or np.abs(one.logprobs - other.logprobs).max() > 1e-3


async def staging_disturbs_nobody(subject: Subject) -> None:
    """While a version is staged and verified, generations go on under the old one."""
    before = await subject.serve()
    running = await subject.begin(subject.request(new=_LONG))
    finishing = asyncio.create_task(running.finish())
    staged = await subject.prepare()
    assert (await subject.engine.status()).staged == staged.version
    assert set((await finishing).policy_version.tolist()) == {before.number}
    await subject.engine.rollback()


async def rollback_forgets(subject: Subject) -> None:
    """After a rollback nothing is staged, and a commit of it is an error."""
    before = await subject.serve()
    version = (await subject.prepare()).version
    await subject.engine.rollback()
    status = await subject.engine.status()
    assert (status.version, status.staged) == (before, None)
    assert await _complaint(subject.engine.commit(version, InFlightMode.CONTINUE))
    assert await _complaint(subject.engine.verify())
    await subject.engine.rollback()
    await subject.run(subject.request(new=2))


async def only_what_is_staged_is_committed(subject: Subject) -> None:
    """A commit of another version is an error, and the staged one can still be committed."""
    before = await subject.serve()
    version = (await subject.prepare()).version
    for wrong in (before, msgspec.structs.replace(version, digest="0" * 64)):
        assert await _complaint(subject.engine.commit(wrong, InFlightMode.CONTINUE))
    assert (await subject.engine.status()).version == before
    await subject.engine.commit(version, InFlightMode.CONTINUE)
    assert (await subject.engine.status()).version == version


async def staging_again_replaces(subject: Subject) -> None:
    """The version staged last is the one that can be committed."""
    await subject.serve()
    first, second = (await subject.prepare()).version, (await subject.prepare()).version
    assert await _complaint(subject.engine.commit(first, InFlightMode.CONTINUE))
    await subject.engine.commit(second, InFlightMode.CONTINUE)


async def what_does_not_fit_is_not_staged(subject: Subject) -> None:
    """A missing, unknown, misshapen or mistyped tensor is an error that names it; serving goes on."""
    before = await subject.serve()
    manifest, source = await subject.publish(1_000_000)
    for name, broken in _broken(manifest):
        complaint = await _complaint(subject.engine.stage(broken, source), (EngineError, PayloadError))
        assert name in complaint
        status = await subject.engine.status()
        assert (status.version, status.staged) == (before, None)
    assert set((await subject.run(subject.request(new=2))).policy_version.tolist()) == {before.number}
    await subject.serve()


async def pinned_requests_keep_their_version(subject: Subject) -> None:
    """An evaluation is served whole by the version it names, also when commits happen before, within and after."""
    if not subject.engine.capabilities.pinned_versions:
        return
    old = await subject.serve()
    reference = await subject.run(subject.request(new=_LONG, seed=6))
    running = await subject.begin(subject.request(new=_LONG, seed=6, pinned=old))
    finishing = asyncio.create_task(running.finish())
    for mode in (InFlightMode.RECOMPUTE, InFlightMode.CONTINUE, InFlightMode.DRAIN):
        await subject.serve(mode)
    late = await subject.run(subject.request(new=_LONG, seed=6, pinned=old))
    for done in (await finishing, late):
        assert set(done.policy_version.tolist()) == set(done.kv_version.tolist()) == {old.number}
        assert done.text == reference.text
        np.testing.assert_allclose(done.logprobs, reference.logprobs, atol=subject.tolerance)


async def an_older_version_than_demanded_is_refused(subject: Subject) -> None:
    """A version that is only staged does not serve yet; once it is committed, every token is of it or a newer one."""
    before = await subject.serve()
    after = (await subject.prepare()).version
    demanding = subject.request(new=_LONG, at_least=after)
    complaint = await _complaint(subject.run(demanding), (EngineRefusedError,))
    assert before.name in complaint
    assert after.name in complaint
    await subject.engine.commit(after, InFlightMode.CONTINUE)
    running = await subject.begin(demanding)
    newest = (await subject.prepare()).version
    await subject.engine.commit(newest, InFlightMode.CONTINUE)
    done = await running.finish()
    assert set(done.policy_version.tolist()) <= {after.number, newest.number}
    assert min(done.kv_version.tolist()) == after.number
    await subject.run(subject.request(new=2, at_least=before))


async def versions_are_ordered_by_incarnation_then_number(subject: Subject) -> None:
    """A later incarnation is newer whatever its numbers; the same place under another digest is another run's."""
    version = await subject.serve()
    change = msgspec.structs.replace
    lower = change(version, incarnation=version.incarnation - 1, number=version.number + 1_000_000)
    await subject.run(subject.request(new=2, at_least=lower))
    for beyond in (change(version, incarnation=version.incarnation + 1, number=0), change(version, digest="0" * 64)):
        complaint = await _complaint(subject.run(subject.request(new=2, at_least=beyond)), (EngineRefusedError,))
        assert version.name in complaint
        assert beyond.name in complaint


async def exactly_another_version_is_refused(subject: Subject) -> None:
    """A version that the engine never held cannot be pinned, nor can one and a least version be demanded at once."""
    if not subject.engine.capabilities.pinned_versions:
        return
    version = await subject.serve()
    never = msgspec.structs.replace(version, number=version.number + 1_000_000)
    complaint = await _complaint(subject.run(subject.request(new=2, pinned=never)), (EngineRefusedError,))
    assert version.name in complaint
    assert never.name in complaint
    both = subject.request(new=2, pinned=version, at_least=version)
    assert "one of the two" in await _complaint(subject.run(both), (EngineRefusedError,))


async def _across_a_commit(subject: Subject, mode: InFlightMode) -> tuple[PolicyVersion, PolicyVersion, Generated]:
    """A generation during which a version was committed."""
    before = await subject.serve()
    after = (await subject.prepare()).version
    running = await subject.begin(subject.request(new=_LONG, seed=7))
    report = await subject.engine.commit(after, mode)
    assert report.running == 1
    assert 0 <= report.pause_s < 5
    return before, after, await running.finish()


def _switches(done: Generated, before: PolicyVersion, after: PolicyVersion) -> bool:
    """The tokens are of `before`, then of `after`."""
    numbers = done.policy_version.tolist()
    cut = numbers.index(after.number)
    return cut > 0 and numbers == [before.number] * cut + [after.number] * (len(numbers) - cut)


def _broken(manifest: Manifest) -> list[tuple[str, Manifest]]:
    """Manifests that do not fit, each with the name of the tensor at fault."""
    first, *others = manifest.tensors
    change = msgspec.structs.replace
    return [
        (first.name, change(manifest, tensors=tuple(others))),
        ("zz.unknown", change(manifest, tensors=(*manifest.tensors, change(first, name="zz.unknown")))),
        (first.name, change(manifest, tensors=(change(first, shape=(*first.shape, 1)), *others))),
        (first.name, change(manifest, tensors=(change(first, dtype="F64"), *others))),
    ]


async def _complaint(call: Awaitable[object], kinds: tuple[type[Exception], ...] = (EngineError,)) -> str:
    """What the error says that the call must raise."""
    try:
        await call
    except kinds as error:
        return str(error)
    raise AssertionError("the call should have failed")


VERSION_CASES: tuple[Case, ...] = (
    continue_keeps_the_context,
    recompute_renews_the_context,
    drain_finishes_what_runs,
    a_withdrawn_drain_changes_nothing,
    prefixes_end_with_their_version,
    versions_differ,
    staging_disturbs_nobody,
    rollback_forgets,
    only_what_is_staged_is_committed,
    staging_again_replaces,
    what_does_not_fit_is_not_staged,
    pinned_requests_keep_their_version,
    an_older_version_than_demanded_is_refused,
    versions_are_ordered_by_incarnation_then_number,
    exactly_another_version_is_refused,
)
