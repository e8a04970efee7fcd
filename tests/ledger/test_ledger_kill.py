"""Whatever the moment of a kill, a reader finds a prefix of what was committed, with equal contents."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.core.wire import pack
from fathom.ledger.events import StepTaken, TrajectoryEnded, WarmStartStepped
from fathom.ledger.reader import LedgerReader
from fathom.ledger.writer import LedgerWriter
from synthetic.records import ended, opening, outcome, step, trajectory

ACTIONS = st.lists(st.sampled_from(["event", "trajectory", "step", "commit"]), min_size=1, max_size=25)


def play(writer: LedgerWriter, action: str, place: int) -> None:
    record = trajectory(place=place, seed=place, versions=(0,) * (1 + place % 5))
    match action:
        case "event":
            writer.append(WarmStartStepped(step=place, loss=0.5, tokens=3))
        case "trajectory":
            writer.append_trajectory(record, ended(record))
        case "step":
            writer.append_step(step(place, (outcome(record),)), (outcome(record),))
        case _:
            writer.commit()


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, moment=st.floats(0, 1), torn=st.floats(0, 1), segment_bytes=st.sampled_from([1500, 1 << 20]))
def test_any_cut_leaves_a_prefix(actions: list[str], moment: float, torn: float, segment_bytes: int) -> None:
    """The container is written before the database of each commit; the cut falls anywhere in that order of bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder, copy = Path(name) / "ledger", Path(name) / "copy"
        writer = LedgerWriter.create(folder, segment_bytes=segment_bytes)
        writer.append(opening())
        writer.commit()
        states = [(writer.last_seq, sizes(folder))]
        for place, action in enumerate([*actions, "commit"]):
            play(writer, action, place)
            if action == "commit":
                states.append((writer.last_seq, sizes(folder)))
        number = round(moment * (len(states) - 2))
        (_, before), (_, after) = states[number], states[number + 1]
        files = [*sorted(name for name in after if name.startswith("arrays-")), "ledger.sqlite-wal"]
        written = sum(after[name] - before.get(name, 0) for name in files)
        left = round(torn * written)
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-shm"))
        for file in files:
            grown = min(left, after[file] - before.get(file, 0))
            left -= grown
            os.truncate(copy / file, before.get(file, 0) + grown)
        writer.close()

        with LedgerReader(folder) as whole, LedgerReader(copy) as cut:
            assert cut.last_seq in (states[number][0], states[number + 1][0])
            assert cut.history() == whole.history(until=cut.last_seq)
            for entry in cut.trajectories():
                assert pack(cut.trajectory(entry.id).trajectory) == pack(whole.trajectory(entry.id).trajectory)
            for recorded in cut.events(StepTaken):
                assert [pack(row) for row in cut.outcomes(recorded.seq)] == [
                    pack(row) for row in whole.outcomes(recorded.seq)
                ]
        with LedgerWriter.open(copy) as again:
            seq = again.append(opening(2, parent_seq=again.last_seq))
            play(again, "trajectory", 1000)
        with LedgerReader(copy) as reader:
            assert reader.last_seq == seq + 1
            assert reader.trajectory(reader.trajectories()[-1].id).entry.seq == seq + 1


WRITE_FOREVER = """
import itertools, sys
from pathlib import Path
from synthetic.records import ended, opening, outcome, step, trajectory
from fathom.ledger.writer import LedgerWriter

writer = LedgerWriter.create(Path(sys.argv[1]), segment_bytes=100_000)
writer.append(opening())
for number in itertools.count(1):
    record = trajectory(place=number, seed=number, versions=(0,) * 50)
    writer.append_trajectory(record, ended(record))
    writer.append_step(step(number, (outcome(record),)), (outcome(record),))
    writer.commit()
    print(writer.last_seq, flush=True)
"""


def test_reported_steps_survive_a_real_kill(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOREVER, str(folder)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        assert process.stdout.readline()
        time.sleep(0.1 + 0.17 * attempt)
        process.send_signal(signal.SIGKILL)
        reported = [int(line) for line in process.stdout.read().split("\n") if line]
        process.wait(timeout=10)
        process.stdout.close()
        with LedgerReader(folder) as reader:
            assert reader.last_seq >= max(reported)
            for recorded in reader.events(TrajectoryEnded):
                assert reader.trajectory(recorded.event.trajectory).entry.seq == recorded.seq
            for recorded in reader.events(StepTaken):
                assert len(reader.outcomes(recorded.seq)) == 1
