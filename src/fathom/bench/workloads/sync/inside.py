"""Measure a fleet from inside a network namespace: `python -m fathom.bench.workloads.sync.inside`.

Reads one line of JSON (`FleetRequest`); the one line on standard output is the `PartAnswer`.
"""

from __future__ import annotations

import os
import sys

import msgspec

from fathom.bench.workloads.sync.fleet import FleetRequest, run_fleet


def main() -> None:
    """Serve one request."""
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=FleetRequest)
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    answer = run_fleet(request, lambda line: print(line, file=sys.stderr, flush=True))
    with os.fdopen(answers, "wb") as stream:
        stream.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
