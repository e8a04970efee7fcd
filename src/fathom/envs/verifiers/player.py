"""The program that knows verifiers: lists a taskset's tasks, or plays one. It runs in another Python environment.

It is asked and answers in lines of JSON, over stdin and what was its stdout; what anything else prints goes to stderr.

    tasks: {env, most} ──> {version, keys}
    play:  {env, position, key} ──> {} (ready); {base_url, key, model} ──> {rewards, stopped, failed, errors}

Only the standard library and, inside functions, `verifiers.v1` may be imported here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import sys
from importlib.metadata import version
from typing import Any

_KEY = "FATHOM_API_KEY"
"""verifiers keeps variables whose names contain API_KEY from the programs that it starts."""
_ERROR_CHARS = 2000


def main() -> None:
    """Answer one request."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())  # a taskset may be a module in the working directory

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    request = json.loads(sys.stdin.readline())
    env = _load(request["env"])
    if request["do"] == "tasks":
        answer(version=version("verifiers"), keys=[task.key for task in itertools.islice(env.taskset, request["most"])])
        return
    task = next(itertools.islice(env.taskset, request["position"], None), None)
    if task is None or task.key != request["key"]:
        raise SystemExit(f"the taskset gives another task {request['position']} than when the run was started")
    answer()
    told = json.loads(sys.stdin.readline() or "null")
    if told is not None:
        answer(**asyncio.run(_until_told(_play(env, task, **told))))


def _load(config: dict[str, Any]) -> Any:
    """The environment of a taskset. Raises SystemExit: several agents play in it."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    env = vf.load_environment(vf.resolve_env_config(config))
    if not isinstance(env, vf.SingleAgentEnv):
        raise SystemExit(f"{type(env).__name__} has agents of its own; only tasksets that one agent plays can be used")
    return env


async def _until_told(work: Any) -> Any:
    """SIGTERM cancels it, so that verifiers takes down what it has started."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


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
        "errors": [f"{error.type}: {error.message}"[:_ERROR_CHARS] for error in errors],
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
