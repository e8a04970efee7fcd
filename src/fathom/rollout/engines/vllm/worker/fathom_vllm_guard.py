"""Runs inside vLLM's API server: every call needs the bearer token, the development endpoints included.

vLLM's own key guards only some paths; the ones that pause it and change its weights are not among them.
"""

# pyright: basic

from __future__ import annotations

import os
import secrets
from typing import Any

TOKEN = "FATHOM_VLLM_TOKEN"
"""Environment variable that holds the token."""


class RequireToken:
    """ASGI middleware, given to `vllm serve --middleware`."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the call on, or answer 401."""
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
        await self._app(scope, receive, send)
