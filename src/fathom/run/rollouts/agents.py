"""Where agents find the model: sessions and their server, for as long as the run rolls out."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from fathom.config.agent import AgentConfig, LimitsConfig
from fathom.config.run import RunConfig
from fathom.core.records.trajectory import TokenizerIdentity
from fathom.envs.agents.processes import AgentProcesses
from fathom.rollout.agent_episode import AgentEpisodeRunner, SessionTerms
from fathom.rollout.session.server import SessionServer
from fathom.rollout.session.session import Generate
from fathom.rollout.session.sessions import Sessions
from fathom.run.turns import TurnText

_MODEL = "policy"
"""What agents call the model. They see no versions: it changes under them."""


@asynccontextmanager
async def agent_runner(
    config: RunConfig,
    text: TurnText,
    processes: AgentProcesses,
    generate: Generate,
    forget: Callable[[str], None],
    identity: TokenizerIdentity,
    *,
    record_routes: bool,
    incarnation: int,
) -> AsyncGenerator[AgentEpisodeRunner]:
    """Serve sessions of a run's incarnation that `generate` answers, as long as it is open.

    `forget` is told of each session that has ended.

    Raises ConfigError when the port cannot be used.
    """
    rollout, agent = config.rollout, config.rollout.agent or AgentConfig()
    sessions = Sessions(
        generate,
        text.renderer,
        text.readers,
        max_tokens=agent.max_kept_tokens,
        idle_s=_longest_s(config.task.limits or LimitsConfig()),
        incarnation=incarnation,
    )
    server = SessionServer(
        sessions,
        model=_MODEL,
        host=agent.host,
        port=agent.port,
        ignored=frozenset(agent.ignored_parameters),
    )
    await server.start()
    gc.collect()
    gc.freeze()  # what lives by now lives to the end: looking through all of it again would hold up every session
    try:
        yield AgentEpisodeRunner(
            sessions=sessions,
            endpoint=server.endpoint,
            play=processes.play,
            terms=SessionTerms(
                max_context_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens,
                max_turns=agent.max_turns,
                max_sampled_tokens=agent.max_sampled_tokens,
                stop_ids=text.tokenizer.special.stop_ids,
                record_routes=record_routes,
            ),
            tokenizer=identity,
            forget=forget,
        )
    finally:
        gc.unfreeze()
        await server.close()


def _longest_s(limits: LimitsConfig) -> float:
    """Seconds that an episode has until acting is over. A session lives through them: its end is the episode's."""
    return limits.boot_s + limits.agent_s + 6 * limits.grace_s + 60.0
