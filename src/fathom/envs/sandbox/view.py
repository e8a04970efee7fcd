"""What of the host can be seen in a sandbox: the command line of bubblewrap."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fathom.core.errors import ConfigError
from fathom.envs.sandbox.spec import SandboxSpec

USER_ID = 1000
"""The user inside. It has no capabilities and cannot get any."""
NOBODY = 65534
"""The user outside, when root starts sandboxes: on the host, what runs inside owns nothing."""
ETC_FILES = {
    "/etc/passwd": f"agent:x:{USER_ID}:{USER_ID}::/:/bin/bash\n",
    "/etc/group": f"agent:x:{USER_ID}:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
"""Written for the sandbox; the host's own are not shown."""

PYTHON = "/usr/bin/python3"
_HOST_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_TOP_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


def require_tools() -> str:
    """Where bubblewrap is.

    Raises:
        ConfigError: it, bash or the system's Python is missing; names the package to install.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ConfigError("sandboxes need the program 'bwrap', which is not installed; run: apt-get install bubblewrap")
    for program, package in ((PYTHON, "python3"), ("/bin/bash", "bash")):
        if not Path(program).exists():
            raise ConfigError(f"sandboxes need {program}; run: apt-get install {package}")
    return bwrap


def bwrap_command(bwrap: str, spec: SandboxSpec, etc_fds: dict[str, int], filter_fd: int | None) -> list[str]:
    """The command that makes the sandbox; what is to run in it is appended.

    Args:
        bwrap: the program.
        spec: what is wanted.
        etc_fds: for each of `ETC_FILES` an open file that it is read from.
        filter_fd: an open file with the filter of system calls. None: there is none.
    """
    command = [bwrap, "--die-with-parent", "--as-pid-1", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    command += ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--seccomp", str(filter_fd)] if filter_fd is not None else []
    command += ["--unshare-cgroup-try", "--disable-userns", "--hostname", "sandbox"]
    command += ["--uid", str(USER_ID), "--gid", str(USER_ID), "--ro-bind", "/usr", "/usr"]
    for link in _TOP_LINKS:
        if os.path.islink(link):
            command += ["--symlink", os.readlink(link), link]
        elif os.path.isdir(link):
            command += ["--ro-bind", link, link]
    command += ["--perms", "0755", "--dir", "/etc"]
    for path in _HOST_ETC:
        command += ["--ro-bind-try", path, path]
    for path, fd in etc_fds.items():
        command += ["--perms", "0644", "--file", str(fd), path]
    size = str(spec.disk_bytes)
    command += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for folder in spec.writable:
        command += ["--size", size, "--tmpfs", folder]
    command += ["--dir", spec.workdir, "--dir", spec.home] if spec.holds(spec.home) else ["--dir", spec.workdir]
    return [*command, "--remount-ro", "/", "--chdir", spec.workdir, "--"]
