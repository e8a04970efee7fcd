"""A fleet under trouble: each engine watched on its own, fenced, replaced; others join and leave; the run goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import SCRIPTED, digests, require_sound, small_config

from fathom import Run
from fathom.core.errors import NoProgressError
from fathom.core.ports.engine import Engine
from fathom.evidence.report.summary import summarise
from fathom.ledger.events import (
    EngineFenced,
    EngineJoined,
    EngineLeft,
    EngineRestored,
    EngineServes,
    Event,
    GroupStarted,
    PublicationCancelled,
    Published,
    StepTaken,
)
from fathom.ledger.reader import LedgerReader
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.rollout.engines.scripted.fault import Call, Fault, Trouble
from fathom.rollout.engines.scripted.script import ToyPolicy
from fathom.rollout.engines.scripted.scripted_engine import Pace, ScriptedEngine
from fathom.run.weights.requests import Answer, JoinRequest, LeaveRequest, RequestBox, Unreadable

FLEET = (SCRIPTED, "engine.count=3", "engine.health_timeout_s=0.5", "staleness.max_staleness=2")


class Workshop:
    """Starts scripted engines, remembers them, and does things to them when something has happened in the run."""

    def __init__(self) -> None:
        self.engines: dict[str, list[ScriptedEngine]] = defaultdict(list)
        self._plan: list[tuple[type[Event], int, Callable[[], None]]] = []
        self._seen: defaultdict[type, int] = defaultdict(int)

    async def launch(self, spec: EmbeddedSpec) -> Engine:
        engine = ScriptedEngine(
            ToyPolicy(json.loads((spec.model_folder / "config.json").read_text())["vocab_size"]),
            engine_id=spec.engine,
            pace=Pace(token_s=0.008),
            max_running=spec.max_running,
            max_context_tokens=spec.max_context_tokens,
        )
        self.engines[spec.engine].append(engine)
        return engine

    def after(self, kind: type[Event], count: int, act: Callable[[], None]) -> None:
        """Act when so many events of a kind have been recorded."""
        self._plan.append((kind, count, act))

    def observe(self, event: Event) -> None:
        self._seen[type(event)] += 1
        due = [act for kind, count, act in self._plan if kind is type(event) and count == self._seen[kind]]
        for act in due:
            act()

    def end_soon_after(self, kind: type[Event]) -> None:
        """Ask the run to end when three more steps were taken after the first event of a kind."""

        def end() -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        self.after(kind, 1, lambda: self.after(StepTaken, self._seen[StepTaken] + 3, end))

    def break_engine(self, name: str, trouble: Trouble, *calls: Call, times: int | None = None) -> None:
        for call in calls:
            self.engines[name][-1].inject(Fault(call=call, trouble=trouble, times=times))


def play(tmp_path: Path, workshop: Workshop, *options: str) -> tuple[Path, LedgerReader]:
    run = Run(small_config(tmp_path, *FLEET, *options))
    result = run.start([workshop.observe], launcher=workshop.launch)
    assert result.reason == "steps"
    require_sound(result.folder)
    return result.folder, LedgerReader(result.folder / "ledger")


def events_of(reader: LedgerReader, kind: type[Event], engine: str) -> list[Event]:
    return [entry.event for entry in reader.events(kind) if entry.event.engine == engine]  # type: ignore[attr-defined]


def test_a_fleet_goes_on_through_every_trouble_at_once(tmp_path: Path) -> None:
    """Show 5 in small: one dies, one answers errors, one hangs, one holds a wrong tensor, one joins and one leaves."""
    workshop, steps = Workshop(), 50
    asked: dict[str, str] = {}

    def box() -> RequestBox:
        return RequestBox.of(next((tmp_path / "runs").iterdir()))

    def ask(name: str, request: JoinRequest | LeaveRequest) -> None:
        asked[name] = box().post(request)

    all_calls = (Call.GENERATE, Call.STATUS, Call.STAGE, Call.SCORE)
    workshop.after(StepTaken, 2, lambda: workshop.engines["engine-0"][-1].die())
    workshop.after(StepTaken, 3, lambda: ask("join", JoinRequest()))
    workshop.after(StepTaken, 5, lambda: workshop.break_engine("engine-1", Trouble.FAILS, *all_calls))
    workshop.after(StepTaken, 8, lambda: workshop.break_engine("engine-2", Trouble.HANGS, *all_calls))
    workshop.after(
        EngineJoined, 4, lambda: workshop.break_engine("engine-3", Trouble.WRONG_DIGEST, Call.VERIFY, times=1)
    )
    workshop.after(EngineRestored, 4, lambda: ask("leave", LeaveRequest(engine="engine-1", within_s=30.0)))
    workshop.after(EngineRestored, 4, lambda: ask("nobody", LeaveRequest(engine="engine-9", within_s=1.0)))
    folder, reader = play(tmp_path, workshop, f"trainer.steps={steps}")

    with reader:
        assert len(digests(folder)) == steps
        for name, words in (
            ("engine-0", "has ended"),
            ("engine-1", "the script says that this fails"),
            ("engine-2", "did not answer a look within 0.5 s"),
            ("engine-3", "wrong tensors"),
        ):
            fences = events_of(reader, EngineFenced, name)
            assert [words in fence.reason for fence in fences] == [True], name  # type: ignore[attr-defined]
            assert len(events_of(reader, EngineRestored, name)) == 1, name
            assert len(workshop.engines[name]) == 2
        joined = [entry.event for entry in reader.events(EngineJoined)]
        assert [(each.engine, each.asked) for each in joined] == [
            *((f"engine-{number}", False) for number in range(3)),
            ("engine-3", True),
        ]
        assert [entry.event.engine for entry in reader.events(EngineLeft)] == ["engine-1"]
        last = reader.latest(Published)
        assert last is not None
        assert set(last.event.committed) == {"engine-0", "engine-2", "engine-3"}
        lives = {life.engine: life for life in summarise(reader).engines}
        assert [lives[f"engine-{number}"].state for number in range(4)] == ["serves", "left", "serves", "serves"]
        assert all(life.fenced == life.restored == 1 for life in lives.values())
        used = {turn.engine for turn in turns_trained(reader)}
        assert used == {f"engine-{number}" for number in range(4)}
    answers = {name: box().answer(request) for name, request in asked.items()}
    assert answers["join"] == Answer(done=True, text="engine-3 joined")
    assert answers["leave"] is not None
    assert answers["leave"].done
    assert answers["nobody"] is not None
    assert not answers["nobody"].done
    assert "there is no engine 'engine-9'" in answers["nobody"].text


def turns_trained(reader: LedgerReader):
    for use in reader.rows():
        for branch in reader.trajectory(use.trajectory).trajectory.payload.branches:
            yield from branch.turns


def test_what_a_fenced_engine_had_not_finished_is_failed_and_no_other_generates_it(tmp_path: Path) -> None:
    workshop = Workshop()
    hangs = Trouble.HANGS, Call.GENERATE, Call.STATUS
    workshop.after(GroupStarted, 8, lambda: workshop.break_engine("engine-1", *hangs))
    _, reader = play(tmp_path, workshop, "trainer.steps=15")
    with reader:
        (fence,) = events_of(reader, EngineFenced, "engine-1")
        assert fence.discarded > 0  # type: ignore[attr-defined]
        failed = [entry.id for entry in reader.trajectories() if entry.status == "failed"]
        assert len(failed) == fence.discarded  # type: ignore[attr-defined]
        asked = [f"{each.request_id}" for made in workshop.engines.values() for one in made for each in one.requests]
        assert len(asked) == len(set(asked))
        assert {f"{name}/t0" for name in failed} <= set(asked)


@pytest.mark.slow
def test_one_that_cannot_be_brought_back_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    workshop = Workshop()

    async def launch(spec: EmbeddedSpec) -> Engine:
        engine = await workshop.launch(spec)
        if spec.engine == "engine-2" and len(workshop.engines["engine-2"]) > 1:
            workshop.engines["engine-2"][-1].die()
        return engine

    workshop.after(StepTaken, 2, lambda: workshop.engines["engine-2"][-1].die())
    workshop.end_soon_after(EngineLeft)
    config = small_config(tmp_path, *FLEET, "trainer.steps=100000")
    result = Run(config).start([workshop.observe], launcher=launch)
    assert (result.reason, result.exit_code) == ("stopped", 143)
    require_sound(result.folder)
    with LedgerReader(result.folder / "ledger") as reader:
        (left,) = reader.events(EngineLeft)
        assert (left.event.engine, "given up" in left.event.reason) == ("engine-2", True)
        assert not reader.events(EngineRestored)


def test_too_few_engines_end_the_run_and_the_message_says_why(tmp_path: Path) -> None:
    workshop = Workshop()

    async def launch(spec: EmbeddedSpec) -> Engine:
        engine = await workshop.launch(spec)
        if len(workshop.engines[spec.engine]) > 1:
            workshop.engines[spec.engine][-1].die()
        return engine

    workshop.after(StepTaken, 2, lambda: workshop.engines["engine-1"][-1].die())
    config = small_config(tmp_path, *FLEET, "sync.min_engines=3", "trainer.steps=100000")
    with pytest.raises(NoProgressError, match=r"engine-1 had to be replaced more than 5 times"):
        Run(config).start([workshop.observe], launcher=launch)


def test_every_engine_proves_every_version_before_it_serves(tmp_path: Path) -> None:
    _, reader = play(tmp_path, Workshop(), "trainer.steps=4")
    with reader:
        proven = {(entry.event.engine, entry.event.version) for entry in reader.events(EngineServes)}
        versions = [entry.event.version for entry in reader.events(Published)]
        assert proven == {(f"engine-{number}", version) for number in range(3) for version in versions}


def test_a_run_is_asked_to_end_while_it_waits_for_an_engine_to_come_back(tmp_path: Path) -> None:
    """Its first publication waits for a new engine, which may take as long as an engine takes to start."""
    workshop, came_back = Workshop(), False

    async def launch(spec: EmbeddedSpec) -> Engine:
        nonlocal came_back
        replacing = bool(workshop.engines)
        if replacing:
            await asyncio.sleep(20.0)
            came_back = True
        engine = await workshop.launch(spec)
        if not replacing:
            workshop.break_engine(spec.engine, Trouble.FAILS, Call.STAGE)
        return engine

    workshop.after(PublicationCancelled, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
    result = Run(small_config(tmp_path, SCRIPTED)).start([workshop.observe], launcher=launch)
    assert (result.reason, result.exit_code, came_back) == ("stopped", 130, False)
    require_sound(result.folder)


def test_requests_that_lie_there_from_before_are_refused(tmp_path: Path) -> None:
    box = RequestBox.of(tmp_path)
    name = box.post(JoinRequest())
    RequestBox.of(tmp_path).open()
    answer = box.answer(name)
    assert answer is not None
    assert not answer.done
    assert RequestBox.of(tmp_path).take() == []


def test_a_request_that_is_being_written_is_not_taken(tmp_path: Path) -> None:
    """Whatever lies in the folder before the rename must look like no request, or it is carried out twice."""
    box = RequestBox.of(tmp_path)
    box.open()
    posted: list[str] = []

    def ask() -> None:
        for _ in range(200):
            posted.append(box.post(JoinRequest()))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    taken: list[str] = []
    while asking.is_alive():
        taken += [name for name, _ in box.take()]
    asking.join()
    taken += [name for name, _ in box.take()]
    assert sorted(taken) == sorted(posted)


def test_a_file_that_is_no_request_is_answered_so(tmp_path: Path) -> None:
    box = RequestBox.of(tmp_path)
    box.open()
    (tmp_path / "requests" / "1.request.json").write_text('{"type": "stop"}')
    ((_, unreadable),) = box.take()
    assert isinstance(unreadable, Unreadable)
