import asyncio
import json
from pathlib import Path

import pytest

from fathom.config.families import EngineKind
from fathom.config.rollout import EngineConfig
from fathom.core.errors import ConfigError
from fathom.core.ids import EngineId
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.rollout.engines.registry import LAUNCHERS


def spec(folder: Path) -> EmbeddedSpec:
    return EmbeddedSpec(
        engine=EngineId("e0"), model_folder=folder, log_path=folder / "engine.log", max_context_tokens=64
    )


def test_every_kind_has_a_launcher() -> None:
    assert set(LAUNCHERS) == set(EngineKind)


def test_a_scripted_engine_needs_only_a_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        asyncio.run(LAUNCHERS[EngineKind.SCRIPTED](EngineConfig(kind=EngineKind.SCRIPTED))(spec(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 32}))

    async def run() -> None:
        engine = await LAUNCHERS[EngineKind.SCRIPTED](EngineConfig(kind=EngineKind.SCRIPTED))(spec(tmp_path))
        await engine.health()
        assert engine.capabilities.max_context_tokens == 64
        await engine.close()

    asyncio.run(run())
