"""What an agent needs to talk to its model, loaded once for all episodes."""

from __future__ import annotations

import asyncio

import anyio.lowlevel
import httpx


def load_http() -> None:
    """Load what httpx would load at its first request: in each episode's process that takes longer than the request."""
    asyncio.run(_load())


async def _load() -> None:
    async with httpx.AsyncClient(trust_env=False, verify=False):
        await anyio.lowlevel.checkpoint()
