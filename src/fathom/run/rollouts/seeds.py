"""Seeds that depend on what is asked, never on when or where it runs."""

from __future__ import annotations

from blake3 import blake3


def request_seed(run_seed: int, stream: int, member: int, attempt: int) -> int:
    """64-bit seed of one request: the same task use, member and attempt give the same numbers, also after a resume."""
    text = f"{run_seed}/{stream}/{member}/{attempt}".encode()
    return int.from_bytes(blake3(text).digest()[:8], "big")
