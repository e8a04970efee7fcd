"""A judge that says what it was told to say: for tests and rehearsals."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self, final


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """What is answered to one call."""

    text: str = "1"
    """What the judge says."""
    status: int = 200
    """HTTP status."""
    delay_s: float = 0.0
    """Seconds before it is answered."""
    total_tokens: int | None = 10
    """Tokens reported. None: no usage is reported."""
    finish_reason: str = "stop"
    """Why it stopped."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """More headers."""
    raw: str | None = None
    """The body as it is. None: a chat completion, or an error that says `text`."""

    def body(self) -> str:
        """What is sent."""
        if self.raw is not None:
            return self.raw
        if self.status != 200:
            return json.dumps({"error": {"message": self.text}})
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text},
            "finish_reason": self.finish_reason,
        }
        completion: dict[str, Any] = {"id": "judgement", "object": "chat.completion", "choices": [choice]}
        if self.total_tokens is not None:
            completion["usage"] = {"total_tokens": self.total_tokens}
        return json.dumps(completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCall:
    """What it was asked."""

    path: str
    """Path of the request."""
    authorization: str
    """The header. Empty: there was none."""
    body: dict[str, Any]
    """The request."""

    @property
    def prompt(self) -> str:
        """The last message."""
        return self.body["messages"][-1]["content"]


Script = Callable[[JudgeCall], JudgeReply]


@final
class ScriptedJudge:
    """Serves on loopback, in a thread, while it is open.

    with ScriptedJudge(JudgeReply(status=503), JudgeReply(text="0.5")) as judge:
        options = JudgeOptions(base_url=judge.base_url, model="any")
    """

    def __init__(self, *replies: JudgeReply | Script) -> None:
        """Call by call; the last one answers all further calls. A function may look at the call first."""
        if not replies:
            raise ValueError("a scripted judge needs at least one reply")
        self._replies = replies
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.calls: list[JudgeCall] = []

    @property
    def base_url(self) -> str:
        """Where it serves, `/v1` included."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, call: JudgeCall) -> JudgeReply:
        with self._lock:
            reply = self._replies[min(len(self.calls), len(self._replies) - 1)]
            self.calls.append(call)
        return reply if isinstance(reply, JudgeReply) else reply(call)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        @final
        class Handler(BaseHTTPRequestHandler):
            """One call."""

            def do_POST(self) -> None:  # the name that http.server looks for
                """Answer as scripted."""
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                call = JudgeCall(path=self.path, authorization=self.headers.get("authorization", ""), body=body)
                reply = answer(call)
                time.sleep(reply.delay_s)
                data = reply.body().encode()
                try:
                    self.send_response(reply.status)
                    for name, value in {"content-type": "application/json", **reply.headers}.items():
                        self.send_header(name, value)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # whoever asked has gone
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        return Handler
