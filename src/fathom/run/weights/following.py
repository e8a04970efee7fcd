"""Followers as commands start them: the reference puller into a folder, and one that drives an embedded engine."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from fathom.core.errors import ConfigError
from fathom.core.ids import EngineId
from fathom.evidence.runs import find_run
from fathom.rollout.engines.embedded.client import EmbeddedEngine
from fathom.run.weights.rebuild import chain_of
from fathom.sync.chain.store import Store
from fathom.sync.follow.folder_receiver import FolderReceiver
from fathom.sync.follow.follower import Follower, News
from fathom.sync.follow.model_files import model_files
from fathom.sync.follow.reports import FollowerReport, require_name


def open_store(place: str, runs_dir: Path) -> Store:
    """The chain that a person means: a URL, a chain's folder, or a run (its folder or name).

    Raises:
        ConfigError: there is none.
    """
    if "://" in place or (Path(place) / "links").is_dir():
        return Store.open(place)
    try:
        run = find_run(place, runs_dir)
    except ConfigError as error:
        raise ConfigError(f"{place!r} is no URL and no folder of a chain (with links/ in it), and {error}") from error
    return chain_of(run)


async def follow_into(
    store: Store, folder: Path, name: str, look_s: float, news: News, *, once: bool
) -> FollowerReport:
    """Materialise each new version below `folder` and turn `folder/current` to it, until SIGINT or SIGTERM.

    `once`: bring it to the newest version and return. Returns how it stood at the end.

    Raises:
        ConfigError: the store describes no model, or something is in the way in `folder`.
    """
    require_name(name)
    receiver = FolderReceiver(EngineId(name), folder, model_files(store))
    try:
        return await _follow(Follower(store, receiver, name, serving=receiver.version), look_s, news, once=once)
    finally:
        receiver.close()


async def follow_with_engine(
    store: Store, url: str, token: str, name: str, look_s: float, news: News, *, once: bool
) -> FollowerReport:
    """The same with an embedded engine that runs elsewhere. It goes on when this ends.

    Raises:
        ConfigError: it is no URL of an engine, or that engine cannot follow.
        EngineError: it does not answer, or the token is not its own.
    """
    require_name(name)
    engine = await EmbeddedEngine.attach(url, token)
    try:
        status = await engine.status()
        return await _follow(Follower(store, engine, name, serving=status.version), look_s, news, once=once)
    finally:
        await engine.close()


async def _follow(follower: Follower, look_s: float, news: News, *, once: bool) -> FollowerReport:
    if once:
        report = await follower.pull()
        news(report)
        await asyncio.to_thread(follower.end)
        return report
    following = asyncio.create_task(follower.follow(look_s, news))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, following.cancel)
    await asyncio.wait([following])
    return follower.report
