"""The first process of a sandbox. It starts the shell, reads what it prints, counts what it uses, and kills.

This file is run by the system's Python, from its text, within the sandbox; so it imports the standard library only.
It is process 1 of its own process namespace: nothing in there can kill it, and when it ends, all in there end. It has
no rights that the processes it watches do not have, and it cannot be read or traced by them.

It takes one request after the other from a socket. A request that comes while a command runs ends that command.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False  # importing typing would take longer than making the sandbox
if TYPE_CHECKING:
    from typing import Any

FRAME = struct.Struct("!II")
"""Length of a JSON header, length of the bytes behind it."""

_LOOP = """
while IFS= read -r -d "" -u 8 FATHOM_COMMAND; do
eval "$FATHOM_COMMAND" 8<&- 9>&- </dev/null
printf '%s\\0' "$?" >&9
done
"""
_LOOK_S = 0.1
_FLOOD_BYTES = 64 << 20
_READ_BYTES = 1 << 16
_OPEN_FILES = 256
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


class Kept:
    """Start and end of a stream, half of `limit` each."""

    def __init__(self, limit: int) -> None:
        self.half = max(limit // 2, 1)
        self.head, self.tail, self.total = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total += len(data)
        room = max(self.half - len(self.head), 0)
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > 2 * self.half:
            del self.tail[: -self.half]

    def take(self) -> tuple[bytes, int]:
        """What was kept, and how many bytes were left out. Starts again."""
        tail = bytes(self.tail[-self.half :])
        left_out = self.total - len(self.head) - len(tail)
        note = b"\n[... %d bytes left out ...]\n" % left_out if left_out else b""
        kept = bytes(self.head) + note + tail
        self.head, self.tail, self.total = bytearray(), bytearray(), 0
        return kept, left_out


class Shell:
    """A bash that waits for commands on descriptor 8 and tells their exit codes on 9."""

    def __init__(self, limits: dict[str, int], env: dict[str, str], folders: list[str]) -> None:
        take, self.orders = os.pipe()
        self.codes, tell = os.pipe()
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        self.status: int | None = None
        self.sources = [self.out, self.err, self.codes]
        self.said = b""
        self.kept = {self.out: Kept(limits["output_bytes"]), self.err: Kept(limits["output_bytes"])}
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become_shell({0: os.open("/dev/null", os.O_RDONLY), 1: out, 2: err, 8: take, 9: tell}, folders, limits)
                os.execve("/bin/bash", ["bash", "--noprofile", "--norc", "-c", _LOOP, "bash"], env)
            finally:
                os._exit(127)
        for fd in (take, tell, out, err):
            os.close(fd)
        for fd in (self.orders, self.codes, self.out, self.err):
            os.set_blocking(fd, False)

    def read(self, fd: int) -> bool:
        """Take what is there. False: there is nothing now, or never again."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data and fd in self.sources:
            self.sources.remove(fd)
        if fd == self.codes:
            self.said = (self.said + data)[-64:]
        else:
            self.kept[fd].add(data)
        return bool(data)

    def folder(self) -> str | None:
        """Where it is now. None: that cannot be seen."""
        try:
            return os.readlink(f"/proc/{self.pid}/cwd")
        except OSError:
            return None

    def close(self) -> None:
        """Let go of its pipes."""
        for fd in (self.orders, self.codes, self.out, self.err):
            os.close(fd)


def _become_shell(places: dict[int, int], folders: list[str], limits: dict[str, int]) -> None:
    os.setsid()
    spare = {place: os.dup2(fd, 100 + place, inheritable=False) for place, fd in places.items()}
    for place, fd in spare.items():
        os.dup2(fd, place, inheritable=True)
    for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for folder in folders:
        try:
            os.chdir(folder)
            break
        except OSError:
            continue
    for what, most in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_DATA, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, limits["num_processes"]),
    ):
        _, hard = resource.getrlimit(what)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (allowed, allowed))


class Supervisor:
    """Answers requests until the socket is closed."""

    def __init__(self, line: socket.socket, workdir: str) -> None:
        self.line = line
        self.workdir = self.folder = workdir
        self.limits: dict[str, int] = {}
        self.env: dict[str, str] = {}
        self.shell: Shell | None = None
        self.looked = 0.0
        self.woken, wake = os.pipe()
        for fd in (self.woken, wake):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, _wake)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Take requests. Between them, what runs in the background goes on and its output is read."""
        self.answer({"number": 0}, b"")
        while True:
            self.wait(None)
            request, blob = self.receive()
            try:
                header, reply = self.act(request, blob)
            except OSError as error:
                header, reply = {"error": f"{error.strerror}: {error.filename or ''}", "errno": error.errno}, b""
            except ValueError as error:
                header, reply = {"error": str(error), "errno": 0}, b""
            header["number"] = request["number"]
            self.answer(header, reply)

    def act(self, request: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        """Do what is asked."""
        what = request["op"]
        if what == "run":
            return self.run(blob, request["timeout_s"])
        if what == "phase":
            self.kill_all()
            self.limits, self.env, self.folder = request["limits"], request["env"], self.workdir
        elif what == "put":
            place = 0
            for path, mode, size in request["files"]:
                _put(path, mode, blob[place : place + size])
                place += size
        elif what == "get":
            return {}, _get(request["path"], request["max_bytes"])
        elif what == "empty":
            _empty(request["path"])
        return {}, b""

    def run(self, command: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Run one command in the shell."""
        if self.shell is None:
            self.shell = Shell(self.limits, self.env, [self.folder, self.workdir, "/"])
        shell = self.shell
        while shell.read(shell.codes):
            pass
        shell.said, unsent = b"", command + b"\0"
        deadline = time.monotonic() + timeout_s
        code, ended = None, "exited"
        while True:
            if shell.status is not None:
                code, ended = shell.status, "shell_ended"
                break
            if b"\0" in shell.said:
                code = _code(shell.said)
                break
            ended = self.limit_met(shell, deadline)
            if ended != "exited":
                break
            unsent = self.wait(unsent)
            if self.asked():
                ended = "timeout"  # nobody waits for this answer any more
                break
        for fd in (shell.out, shell.err):
            while shell.kept[fd].total < 2 * _FLOOD_BYTES and shell.read(fd):
                pass
        self.folder = shell.folder() or self.folder
        out, out_left = shell.kept[shell.out].take()
        err, err_left = shell.kept[shell.err].take()
        if ended == "shell_ended":
            shell.close()
            self.shell = None
        elif ended != "exited":
            self.kill_all()
        left = out_left + err_left
        return {"exit_code": code, "ended": ended, "stdout_bytes": len(out), "left_out_bytes": left}, out + err

    def limit_met(self, shell: Shell, deadline: float) -> str:
        """The limit that a command has met; `exited`: none."""
        now = time.monotonic()
        if now >= deadline:
            return "timeout"
        if sum(kept.total for kept in shell.kept.values()) > _FLOOD_BYTES:
            return "output"
        if now >= self.looked + _LOOK_S:
            self.looked = now
            if _memory_bytes() > self.limits["memory_bytes"]:
                return "memory"
        return "exited"

    def wait(self, unsent: bytes | None) -> bytes:
        """Until something happens: a request, output, an exit code, a process that ended.

        Args:
            unsent: what the shell is still to be sent; while a command runs this returns soon in any case. None: no
                command runs, and only a request ends the wait.
        """
        while True:
            shell = self.shell
            sources = [self.line.fileno(), self.woken]
            sources += shell.sources if shell else []
            sinks = [shell.orders] if shell and unsent else []
            ready, writable, _ = select.select(sources, sinks, [], None if unsent is None else _LOOK_S)
            if shell is not None:
                for fd in set(ready) & set(shell.sources):
                    shell.read(fd)
            if writable and shell is not None and unsent:
                try:
                    unsent = unsent[os.write(shell.orders, unsent) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:  # the shell is ending, which is heard of when it has
                    unsent = b""
            self.reap(ready)
            if unsent is not None or self.line.fileno() in ready:
                return unsent or b""

    def asked(self) -> bool:
        """Another request is there, or the other side is gone."""
        return bool(select.select([self.line], [], [], 0)[0])

    def reap(self, ready: list[int]) -> None:
        """Take notice of processes that ended, whoever started them."""
        if self.woken in ready:
            os.read(self.woken, _READ_BYTES)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.shell is not None and pid == self.shell.pid:
                killed = os.WIFSIGNALED(status)
                self.shell.status = 128 + os.WTERMSIG(status) if killed else os.WEXITSTATUS(status)

    def kill_all(self) -> None:
        """End every process but this one, and wait for them."""
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        if self.shell is not None:
            self.shell.close()
            self.shell = None

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """One request. Ends this process, and all others, when there will be none."""
        header, blob = FRAME.unpack(self.exactly(FRAME.size))
        return json.loads(self.exactly(header)), self.exactly(blob)

    def exactly(self, size: int) -> bytes:
        """The next `size` bytes from the socket."""
        data = bytearray()
        while len(data) < size:
            part = self.line.recv(min(size - len(data), 1 << 20))
            if not part:
                os._exit(0)
            data += part
        return bytes(data)

    def answer(self, header: dict[str, Any], blob: bytes) -> None:
        """Send one frame."""
        text = json.dumps(header).encode()
        try:
            self.line.sendall(FRAME.pack(len(text), len(blob)) + text + blob)
        except OSError:
            os._exit(0)


def _wake(number: int, frame: object) -> None:
    """Without a handler the kernel would drop the signal, and nothing would be written to the wakeup descriptor."""


def _code(said: bytes) -> int:
    """The exit code. Who forges one fools only himself, and gets 255 if it is none."""
    text = said.split(b"\0")[0]
    return int(text) if text.isdigit() and len(text) <= 3 else 255


def _memory_bytes() -> int:
    """Private and shared memory in use by all processes but this one."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/status", "rb") as lines:
                    total += sum(int(line.split()[1]) for line in lines if line[:8] in (b"RssAnon:", b"RssShmem"))
            except (OSError, ValueError, IndexError):
                continue
    return total * 1024


def _open_parent(path: str, *, make: bool) -> tuple[int, str]:
    """A descriptor of the folder that `path` is in, and the name in it. Follows no symbolic link."""
    *folders, name = path.strip("/").split("/")
    here = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    for folder in folders:
        try:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(folder, 0o755, dir_fd=here)
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here, name


def _put(path: str, mode: int, content: bytes) -> None:
    parent, name = _open_parent(path, make=True)
    try:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(name, flags, mode, dir_fd=parent), "wb") as file:
            file.write(content)
    finally:
        os.close(parent)


def _get(path: str, max_bytes: int) -> bytes:
    parent, name = _open_parent(path, make=False)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    finally:
        os.close(parent)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"{path} is not a plain file")
    with open(fd, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path} is larger than {max_bytes} bytes")
    return content


def _empty(path: str) -> None:
    """Remove all that is in a folder, whatever modes it was given."""
    parent, name = _open_parent(path, make=True)
    try:
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent)
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.chmod(name, 0o755, dir_fd=parent)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    finally:
        os.close(parent)
    _empty_open(fd)


def _empty_open(fd: int) -> None:
    """Without recursion: folders are moved up to this one before they are removed, however deep they lie."""
    try:
        number = 0
        while names := os.listdir(fd):
            for name in names:
                if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=fd)
                    continue
                os.chmod(name, 0o700, dir_fd=fd)
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                try:
                    for inner in os.listdir(below):
                        if stat.S_ISDIR(os.stat(inner, dir_fd=below, follow_symlinks=False).st_mode):
                            number += 1
                            os.chmod(inner, 0o700, dir_fd=below)
                            os.rename(inner, f".fathom-{time.monotonic_ns()}-{number}", src_dir_fd=below, dst_dir_fd=fd)
                        else:
                            os.unlink(inner, dir_fd=below)
                finally:
                    os.close(below)
                os.rmdir(name, dir_fd=fd)
    finally:
        os.close(fd)


def main() -> None:
    """Serve on the socket whose number is the first argument; the second is the folder to work in."""
    control = ctypes.CDLL(None).prctl
    control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    control(_PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    number = int(sys.argv[1])
    os.set_inheritable(number, False)
    os.umask(0o022)
    Supervisor(socket.socket(fileno=number), sys.argv[2]).serve()


if __name__ == "__main__":
    main()
