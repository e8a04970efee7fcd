"""One launcher per kind of engine."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from fathom.config.families import EngineKind
from fathom.config.rollout import EngineConfig
from fathom.core.errors import ConfigError
from fathom.core.ports.engine import Engine
from fathom.rollout.engines.embedded.client import EmbeddedEngine
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.rollout.engines.scripted.script import ToyPolicy
from fathom.rollout.engines.scripted.scripted_engine import ScriptedEngine
from fathom.rollout.engines.vllm.spec import vllm_spec
from fathom.text.tokenizer import Tokenizer

Launcher = Callable[[EmbeddedSpec], Awaitable[Engine]]


async def _launch_scripted(spec: EmbeddedSpec) -> Engine:
    """A random bigram model over the vocabulary of the folder: for trying out everything around an engine."""
    config = spec.model_folder / "config.json"
    try:
        vocab_size = int(json.loads(config.read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{config} does not say vocab_size: {error}; give a Hugging Face model folder") from error
    has_tokenizer = (spec.model_folder / "tokenizer.json").is_file()
    return ScriptedEngine(
        ToyPolicy(vocab_size),
        engine_id=spec.engine,
        decode=Tokenizer.load(spec.model_folder).decode if has_tokenizer else None,
        max_running=spec.max_running,
        max_context_tokens=spec.max_context_tokens,
    )


def _vllm(config: EngineConfig) -> Launcher:
    from fathom.rollout.engines.vllm.client import VllmEngine  # only here: it makes versions of deltas, with torch

    async def launch(spec: EmbeddedSpec) -> Engine:
        return await VllmEngine.launch(vllm_spec(spec, config))

    return launch


LAUNCHERS: dict[EngineKind, Callable[[EngineConfig], Launcher]] = {
    EngineKind.EMBEDDED: lambda _: EmbeddedEngine.launch,
    EngineKind.SCRIPTED: lambda _: _launch_scripted,
    EngineKind.VLLM: _vllm,
}
"""How engines of each kind are started; one holds no version until one is committed."""
