"""The process: `python -m fathom.rollout.engines.embedded.server`.

Reads one `EngineConfigLine` from standard input and keeps watching it: when it closes, whoever started this process
is gone, and so is this process within a second, even in the middle of a computation. Ctrl-C is the parent's business.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading

import msgspec

from fathom.core.errors import ConfigError, FathomError
from fathom.rollout.engines.embedded.messages import CannotStartLine, EngineConfigLine, ReadyLine, StartLine

_WATCH_S = 0.5
_SWITCH_S = 0.0005
"""How long one Python thread may hold back another: HTTP must not wait behind the decode loop's 5 ms turns."""


def main() -> None:
    """Serve until the parent goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_S)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfigLine)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        listener = _listen(config.host, config.port)
        from fathom.rollout.engines.embedded.server.engine_server import EngineServer  # slow, so after the port

        server = EngineServer(config)
    except FathomError as error:
        _say(CannotStartLine(reason=str(error)))
        sys.exit(2)
    _say(ReadyLine(port=listener.getsockname()[1], capabilities=server.capabilities))
    server.serve(listener)


def _listen(host: str, port: int) -> socket.socket:
    # Named as TCP, or asyncio leaves Nagle's algorithm on for every connection, and an answer waits 40 ms for its body.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        raise ConfigError(
            f"engine.port = {port} on {host} cannot be used ({error}); choose another, or 0 for any free one"
        ) from error
    return listener


def _say(line: StartLine) -> None:
    """The only line on standard output; what others print goes to the log from here on."""
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def _end_with_parent(parent: int) -> None:
    """A fork of the parent may hold the pipe open after its death, so its process id is watched as well."""
    while os.getppid() == parent:
        ready, _, _ = select.select([sys.stdin], [], [], _WATCH_S)
        if ready and not os.read(sys.stdin.fileno(), 1024):
            break
    os._exit(0)


if __name__ == "__main__":
    main()
