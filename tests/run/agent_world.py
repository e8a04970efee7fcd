"""Groups of agents' episodes as a run plays them, over an engine that is given: all of a run but its trainer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from talks import TEMPLATE

from fathom.config.load import parse_config
from fathom.core.ids import GroupId, Occurrence, TaskId
from fathom.core.manifest import DiskSource, Manifest
from fathom.core.ports.agent import AgentEnvironment
from fathom.core.ports.environment import Task
from fathom.core.records.sampling import InFlightMode, Purpose, SamplingParams
from fathom.core.records.trajectory import Trajectory, Ungraded
from fathom.envs.agents import AgentProcesses
from fathom.rollout.engines.scripted.fault import Call, Fault, Trouble
from fathom.rollout.engines.scripted.script import ToyPolicy
from fathom.rollout.engines.scripted.scripted_engine import ScriptedEngine
from fathom.rollout.episode import EpisodePlan
from fathom.rollout.router.router import Router
from fathom.run.rollouts.agents import agent_runner
from fathom.run.turns import TurnText
from fathom.text.characters import save_character_tokenizer
from fathom.text.chat_renderer import ChatRenderer
from fathom.text.tokenizer import Tokenizer
from synthetic.records import policy

CONFIG = parse_config(
    {
        "name": "talks",
        "model": {"tiny": "arithmetic"},
        "task": {
            "kind": "talks:Talks",
            "limits": {"boot_s": 3, "agent_s": 3, "grade_s": 3, "close_s": 3, "grace_s": 0.2},
        },
        "rollout": {"group_size": 8, "max_new_tokens": 12, "max_prompt_tokens": 188, "agent": {"max_turns": 8}},
        "trainer": {"steps": 1, "groups_per_step": 1, "optimizer": {"lr": 1e-3}},
    },
    "talks",
)


class AgentWorld:
    """Episodes of an environment with a scripted engine; everything between is as in a run."""

    def __init__(self, environment: AgentEnvironment, folder: Path, *, grade_s: float = 3.0) -> None:
        save_character_tokenizer(folder)
        described = folder / "tokenizer_config.json"
        described.write_text(json.dumps(json.loads(described.read_text()) | {"chat_template": TEMPLATE}))
        self.tokenizer = Tokenizer.load(folder)
        assert CONFIG.task.limits is not None
        limits = CONFIG.task.limits.model_copy(update={"grade_s": grade_s})
        self.processes = AgentProcesses(environment, limits)
        self.text = TurnText.of(self.tokenizer)
        self.identity = ChatRenderer(self.tokenizer, use_template=True).identity
        self.groups = 0

    async def play(
        self, *faults: str, engine: ScriptedEngine | None = None, silenced: Sequence[int] = ()
    ) -> list[Trajectory]:
        """A group of as many members as there are faults; "": none. The engine is silent in turn 1 of `silenced`."""
        self.groups += 1
        hangs = [
            Fault(call=Call.GENERATE, trouble=Trouble.HANGS, request_id=f"g{self.groups}/m{member}/t1")
            for member in silenced
        ]
        engine = engine or ScriptedEngine(ToyPolicy(54), max_context_tokens=200, faults=hangs)
        await engine.stage(Manifest(version=policy(0), parent=None, tensors=()), DiskSource(path=""))
        await engine.verify()
        await engine.commit(policy(0), InFlightMode.CONTINUE)
        router = Router(lambda: [engine], lambda *_: None, wait_s=5.0)
        plans = [self.plan(member, fault) for member, fault in enumerate(faults)]
        async with agent_runner(
            CONFIG,
            self.text,
            self.processes,
            router.generate,
            router.forget,
            self.identity,
            record_routes=False,
            incarnation=1,
        ) as runner:
            return list(await asyncio.gather(*map(runner.run, plans)))

    def plan(self, member: int, fault: str) -> EpisodePlan:
        return EpisodePlan(
            group=GroupId(f"g{self.groups}"),
            member=member,
            occurrence=Occurrence(epoch=0, index=0),
            attempt=0,
            task=Task(id=TaskId("t"), messages=(), answer=fault),
            prompt_ids=np.empty(0, np.int32),
            sampling=SamplingParams(),
            max_new_tokens=12,
            seed=member,
            priority=0,
            purpose=Purpose.ROLLOUT,
            pinned=None,
            barrier=None,
        )


def causes(group: list[Trajectory]) -> Counter[str]:
    """How many members were graded, and why the others were not."""
    return Counter(each.header.reward.cause if isinstance(each.header.reward, Ungraded) else "graded" for each in group)
