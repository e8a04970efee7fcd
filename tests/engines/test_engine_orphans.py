import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shelf import tiny_folder

PARENT = """
import asyncio, os, sys, time
from pathlib import Path
from fathom.core.ids import EngineId
from fathom.rollout.engines.embedded.process import EmbeddedSpec, EngineProcess

async def main():
    folder = Path(sys.argv[1])
    spec = EmbeddedSpec(
        engine=EngineId("e0"), model_folder=folder, log_path=folder / "engine.log", max_context_tokens=64
    )
    process = await EngineProcess.launch(spec)
    heir = os.fork()  # holds every descriptor of its parent, the engine's standard input included
    if heir == 0:
        time.sleep(60)
        os._exit(0)
    print(process.pid, heir, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_kill_9_of_the_parent_leaves_no_engine(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tiny_folder(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine, heir = map(int, parent.stdout.readline().split())
    parent.stdout.close()
    try:
        assert exists(engine)
        parent.kill()
        parent.wait()
        killed_s = time.monotonic()
        while exists(engine) and time.monotonic() - killed_s < 15:  # it takes half a second, where there is a CPU
            time.sleep(0.02)
        assert not exists(engine)
    finally:
        os.kill(heir, signal.SIGKILL)


def exists(pid: int) -> bool:
    """False for a zombie too: nobody may be there to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
