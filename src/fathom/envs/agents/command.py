"""An agent that is a program: it is started with a base URL and a key, as with any provider of models."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, final

from fathom.core.ports.agent import Endpoint

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "SSL_CERT_FILE")
_TAIL_BYTES = 2000


class AgentExitError(Exception):
    """The program ended with an error; the message holds the last it wrote."""


@final
class CommandAgent:
    """Starts a command line and waits for its end; nothing of it survives that.

    Its environment: `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL` and the same of `ANTHROPIC`; of the run's own
    variables only those that name no secret (`PATH`, `HOME`, locale, folders).
    """

    def __init__(
        self, command: Sequence[str], *, folder: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Nothing starts yet.

        Args:
            command: program and arguments; `{model}` in an argument is replaced by the name of the model.
            folder: where it is started. None: the run's working directory.
            variables: more of its environment.
        """
        self._command = tuple(command)
        self._folder = folder
        self._variables = dict(variables or {})

    async def act(self, endpoint: Endpoint) -> None:
        """Run it to its end. Cancelled, it is killed, and all of its process group.

        Raises:
            AgentExitError: it ended with another code than 0, or cannot be started.
        """
        with tempfile.TemporaryFile() as output:
            code = await self._run(endpoint, output)
            if code:
                how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
                raise AgentExitError(f"{self._command[0]} ended with {how}: {_tail(output)}")

    async def _run(self, endpoint: Endpoint, output: IO[bytes]) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *(part.replace("{model}", endpoint.model) for part in self._command),
                cwd=self._folder,
                env=environment(endpoint) | self._variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentExitError(f"{self._command[0]} cannot be started: {error}") from error
        try:
            return await process.wait()
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def environment(endpoint: Endpoint) -> dict[str, str]:
    """The variables by which clients of OpenAI and Anthropic find this model, and what any program needs."""
    return {name: os.environ[name] for name in _INHERITED if name in os.environ} | {
        "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
        "OPENAI_API_KEY": endpoint.key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.base_url,
        "ANTHROPIC_API_KEY": endpoint.key,
        "ANTHROPIC_MODEL": endpoint.model,
    }


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    return output.read().decode(errors="replace").strip() or "it wrote nothing"
