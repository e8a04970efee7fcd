"""One engine, one trainer and what lies between them, without a run around: what several workloads measure on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from fathom.config.families import Dtype, TransportKind
from fathom.config.objective import ObjectiveConfig
from fathom.config.rollout import EngineConfig
from fathom.config.sync import SyncConfig
from fathom.config.trainer import StalenessConfig, TrainerConfig
from fathom.core.ids import EngineId
from fathom.core.ports.engine import DigestKind, Engine
from fathom.core.records.row import row_of_text
from fathom.core.records.sampling import InFlightMode
from fathom.model.tiny import make_tiny
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.rollout.engines.registry import LAUNCHERS
from fathom.rollout.episode import EpisodeRunner, Grade
from fathom.rollout.router.router import Router
from fathom.sync.probe import TOLERANCES, Probe
from fathom.sync.publication import Publication
from fathom.sync.publisher import Publisher
from fathom.sync.transports import TRANSPORTS
from fathom.text.characters import save_character_tokenizer
from fathom.text.chat_renderer import ChatRenderer
from fathom.text.tokenizer import Tokenizer
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.trainer import Trainer

PROMPT_TOKENS = 96
"""Room that workloads leave for a short prompt in a chat template."""
_ENGINE = EngineId("engine-0")
_EMBEDDED = EngineConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """The parts, ready: the engine runs, and serves nothing until `publish`."""

    engine: Engine
    """A real engine in its own process."""
    backend: TorchBackend
    """The trainer's model, in this process."""
    trainer: Trainer
    """Takes steps on it; synchronous."""
    publisher: Publisher
    """Delivers the trainer's weights to the engine."""
    tokenizer: Tokenizer
    """The model's."""
    renderer: ChatRenderer
    """By the model's chat template, or plain text where it has none."""
    vocab_size: int
    """Ids that prompts may be made of."""
    dtype: Dtype
    """Element type of both forwards."""

    async def publish(self, number: int, mode: InFlightMode = InFlightMode.DRAIN) -> Publication:
        """Make the trainer's weights serve, as version `number`."""
        return await self.publisher.publish(self.backend.weights(), number, 1, mode, probe=await self._probe())

    async def _probe(self) -> Probe | None:
        able = self.engine.capabilities
        if able.digest is DigestKind.MEMORY:
            return None
        return await Probe.prepare(
            self._text_logprobs,
            vocab_size=self.vocab_size,
            longest=able.max_context_tokens,
            tolerance=TOLERANCES[self.dtype],
        )

    async def _text_logprobs(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self.trainer.logprobs([row_of_text(text) for text in texts])

    def runner(self, grade: Grade, stop_ids: tuple[int, ...]) -> EpisodeRunner:
        """Plays episodes on the engine."""
        return EpisodeRunner(
            router=Router(lambda: [self.engine], lambda engine, reason: None),
            decode=self.tokenizer.decode,
            grade=grade,
            stop_ids=stop_ids,
            tokenizer=self.renderer.identity,
            record_routes=False,
        )


@asynccontextmanager
async def open_stand(
    model: Path,
    scratch: Path,
    trainer: TrainerConfig,
    *,
    max_context_tokens: int,
    max_running: int,
    engine_config: EngineConfig = _EMBEDDED,
    aligned: bool = False,
    transport: TransportKind = TransportKind.SHARED,
) -> AsyncGenerator[Stand]:
    """Load the trainer, start the engine; end both afterwards. Logs and published files go to `scratch`.

    Raises:
        ConfigError: the model cannot be loaded. EngineError: the engine does not start.
    """
    backend = TorchBackend(model, trainer, aligned=aligned)
    tokenizer = Tokenizer.load(model)
    engine = await LAUNCHERS[engine_config.kind](engine_config)(
        EmbeddedSpec(
            engine=_ENGINE,
            model_folder=model,
            log_path=scratch / f"{_ENGINE}.log",
            max_context_tokens=max_context_tokens,
            max_running=max_running,
            dtype=trainer.dtype,
            threads=engine_config.threads,
            aligned=aligned,
            speculation=engine_config.speculation,
            draft_tokens=engine_config.draft_tokens,
            draft_model_folder=None if engine_config.draft_model is None else Path(engine_config.draft_model),
        )
    )
    try:
        sync = SyncConfig(transport=transport)
        publisher = Publisher([engine], TRANSPORTS[transport](scratch, sync), sync)
        try:
            yield Stand(
                engine=engine,
                backend=backend,
                trainer=Trainer(backend, trainer, ObjectiveConfig(), StalenessConfig(max_staleness=0)),
                publisher=publisher,
                tokenizer=tokenizer,
                renderer=ChatRenderer(tokenizer, use_template=tokenizer.template is not None),
                vocab_size=vocab_size(model),
                dtype=trainer.dtype,
            )
        finally:
            await publisher.close()
    finally:
        await engine.close()


def vocab_size(model: Path) -> int:
    """What the model's config says."""
    return int(msgspec.json.decode((model / "config.json").read_bytes())["vocab_size"])


def tiny_model(folder: Path, seed: int = 0) -> Path:
    """Make the tiny model of the demo in `folder`, from a seed; returns the folder."""
    folder.mkdir(parents=True)
    save_character_tokenizer(folder)
    make_tiny("arithmetic", seed, folder)
    return folder
