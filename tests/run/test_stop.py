"""A request to end, and what fails because of it."""

from __future__ import annotations

import asyncio

import pytest

from fathom.core.errors import ConfigError, RunStoppedError
from fathom.run.stop import Stop


async def failing(stop: Stop) -> None:
    async with stop.cancels():
        raise ConfigError("the grader process ended while it started")


def test_what_the_same_signal_ended_may_be_heard_of_before_the_signal() -> None:
    async def main() -> None:
        stop = Stop()
        asyncio.get_running_loop().call_later(0.01, stop.ask)
        await failing(stop)

    with pytest.raises(RunStoppedError):
        asyncio.run(main())


def test_a_failure_without_a_request_is_told_as_it_is() -> None:
    async def main() -> None:
        await failing(Stop())

    with pytest.raises(ConfigError, match="ended while it started"):
        asyncio.run(main())


def test_a_request_ends_what_is_waited_for_and_what_begins_later() -> None:
    async def main() -> list[str]:
        stop, told = Stop(), list[str]()
        asyncio.get_running_loop().call_later(0.01, stop.ask)
        for _ in range(2):
            try:
                async with stop.cancels():
                    await asyncio.sleep(3600)
            except RunStoppedError as error:
                told.append(str(error))
        await asyncio.sleep(0)  # nothing of it is left to come
        return told

    assert len(asyncio.run(main())) == 2


def test_the_end_of_the_task_itself_is_no_request() -> None:
    async def main() -> None:
        async def waits() -> None:
            async with Stop().cancels():
                await asyncio.sleep(3600)

        task = asyncio.create_task(waits())
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
