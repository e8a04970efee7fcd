"""The program that knows verifiers: lists a taskset's tasks, or plays them. It runs in another Python environment.

Its order is a line of JSON over stdin; what it and its tasksets print goes to stderr.

    tasks: {do, env, most} ──> {version, keys}, over what was its stdout
    play:  {do, env, most, parent, door} ──> loads the taskset, then forks a player for each episode that comes to the
           door, a socket. With it come the episode's own socket, a file for what is printed, and a receipt, which is
           closed when the player and all that it started are gone.

A player is asked and answers over the episode's socket. When that is half closed it takes down what it has started and
ends; when it is closed, the player is killed.

    {position, key, memory} ──> {} (ready); {base_url, key, model} ──> {rewards, stopped, failed, errors}

Only the standard library and, inside functions, `verifiers.v1` may be imported here.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import itertools
import json
import math
import os
import resource
import select
import signal
import socket
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from fathom.envs.nursery import offspring
else:  # by its place: of Fathom nothing else can be loaded here
    _spec = importlib.util.spec_from_file_location(
        "fathom_offspring", Path(__file__).parents[1] / "nursery" / "offspring.py"
    )
    offspring = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(offspring)

_KEY = "FATHOM_API_KEY"
"""verifiers keeps variables whose names contain API_KEY from the programs that it starts."""
_ERRORS, _ERROR_CHARS = 16, 2000
_LINE_BYTES = 1 << 20
_FILES_OF_EPISODE = 3


def main() -> None:
    """Do as the order says."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())  # a taskset may be a module in the working directory
    order = json.loads(sys.stdin.readline())
    if order["do"] == "play":
        offspring.die_with(order["parent"])
        offspring.adopt_orphans()
        os.set_inheritable(order["door"], False)
    env = _load(order["env"])
    tasks = list(itertools.islice(env.taskset, order["most"]))
    if order["do"] == "tasks":
        print(json.dumps({"version": version("verifiers"), "keys": [task.key for task in tasks]}), file=answers)
        return
    line = _keep(socket.socket(fileno=order["door"]))
    if line is not None:
        asyncio.run(_Player(env, tasks).serve(line))


def _load(config: dict[str, Any]) -> Any:
    """The environment of a taskset. Raises SystemExit: several agents play in it."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    env = vf.load_environment(vf.resolve_env_config(config))
    if not isinstance(env, vf.SingleAgentEnv):
        raise SystemExit(f"{type(env).__name__} has agents of its own; only tasksets that one agent plays can be used")
    return env


@dataclass(slots=True)
class _Kept:
    """A player, as the process that forked it knows it."""

    process: int
    line: socket.socket
    receipt: int

    def gone(self) -> None:
        """Say so."""
        self.line.close()
        os.close(self.receipt)


def _keep(door: socket.socket) -> socket.socket | None:
    """Fork players, and end each with all that it started when its episode has gone, or it has ended by itself.

    Returns:
        In a player: its socket. In this process: None, when no more episodes come.
    """
    own = offspring.children()  # what the taskset started when it was loaded
    gc.collect()
    gc.freeze()  # a player that collects would copy every page of what it shares with this process
    ended, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.signal(signal.SIGCHLD, _hear)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    poll, players = select.poll(), dict[int, _Kept]()
    for source in (door.fileno(), ended):
        poll.register(source, select.POLLIN)
    while True:
        ready = {source for source, _ in poll.poll()}
        if ended in ready:
            os.read(ended, _LINE_BYTES)
        for number in [each for each, kept in players.items() if each in ready or _has_ended(kept.process)]:
            poll.unregister(number)
            kept = players.pop(number)
            offspring.end(kept.process)
            offspring.end_strays(own | {each.process for each in players.values()})
            kept.gone()
        if door.fileno() not in ready:
            continue
        knock, files, _, _ = socket.recv_fds(door, 1, _FILES_OF_EPISODE)
        if not knock:
            for kept in players.values():
                offspring.end(kept.process)
            offspring.end_strays(set())
            return None
        for number in files:
            os.set_inheritable(number, False)
        if len(files) < _FILES_OF_EPISODE:  # this process has too many files open: the episode hears that it is over
            for number in files:
                os.close(number)
            continue
        line, printed, receipt = socket.socket(fileno=files[0]), files[1], files[2]
        keeper, player = os.getpid(), os.fork()
        if player:
            os.close(printed)
            players[line.fileno()] = _Kept(player, line, receipt)
            poll.register(line, 0)  # is told of its end all the same
            continue
        offspring.die_with(keeper)
        offspring.adopt_orphans()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for kept in (*players.values(), _Kept(0, door, receipt)):
            kept.gone()
        for number in (1, 2):
            os.dup2(printed, number)
        return line


def _hear(number: int, frame: object) -> None:
    """Without a handler the kernel would drop the signal, and nothing would be written to the wakeup descriptor."""


def _has_ended(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@final
class _Player:
    """Plays one episode."""

    def __init__(self, env: Any, tasks: list[Any]) -> None:
        self._env = env
        self._tasks = tasks

    async def serve(self, line: socket.socket) -> None:
        """Answer until nobody asks any more.

        Raises:
            SystemExit: the taskset gives another task now. CancelledError: the episode was ended.
        """
        reader, writer = await asyncio.open_unix_connection(sock=line, limit=_LINE_BYTES)
        asked = json.loads(await reader.readline())
        resource.setrlimit(resource.RLIMIT_DATA, asked["memory"])
        position = asked["position"]
        task = self._tasks[position] if position < len(self._tasks) else None
        if task is None or task.key != asked["key"]:
            raise SystemExit(f"the taskset gives another task {position} than when the run was started")
        writer.write(b"{}\n")
        told = json.loads(await reader.readline() or "null")
        if told is None:
            return
        playing = asyncio.create_task(_play(self._env, task, **told))
        hung_up = asyncio.create_task(reader.read())
        await asyncio.wait({playing, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if not playing.done():
            playing.cancel()  # verifiers takes down what it has started
        writer.write(json.dumps(await playing).encode() + b"\n")
        await writer.drain()
        hung_up.cancel()


async def _play(env: Any, task: Any, *, base_url: str, key: str, model: str) -> dict[str, Any]:
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    os.environ[_KEY] = key
    client = vf.EvalClientConfig(base_url=f"{base_url}/v1", api_key_var=_KEY)
    context = vf.ModelContext(client=client, model=model, sampling=vf.SamplingConfig())
    async with env.serving():
        episode = await env.run_episode(task, context)
    traces = episode.traces
    errors = [*(error for trace in traces if not trace.ok for error in trace.errors), *episode.errors]
    failed = _kind(errors[-1].type) if errors else ""
    return {
        "rewards": {name: _finite(reward) for trace in traces for name, reward in trace.rewards.items()},
        "stopped": (traces[-1].stop_condition or "") if traces else "",
        "failed": failed or ("" if episode.ok else "error"),
        "errors": [f"{error.type}: {error.message}"[:_ERROR_CHARS] for error in errors[-_ERRORS:]],
    }


def _finite(reward: Any) -> float | None:
    return reward.value if reward is not None and math.isfinite(reward.value) else None


def _kind(name: str) -> str:
    """What verifiers calls a boundary that an error crossed: `TaskError` is `task_error`."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    known = getattr(vf, name, None)
    typed = isinstance(known, type) and issubclass(known, vf.RolloutError)
    return f"{name.removesuffix('Error').lower()}_error" if typed else "error"


if __name__ == "__main__":
    main()
