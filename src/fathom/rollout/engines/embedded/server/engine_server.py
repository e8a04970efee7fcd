"""Wires the process: model, KV memory, scheduler and HTTP server."""

from __future__ import annotations

import asyncio
import os
import queue
import resource
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
import uvicorn

from fathom.config.families import Speculation, TransportKind
from fathom.core.adapter import AdapterForm, AdapterIdentity
from fathom.core.errors import ConfigError
from fathom.core.ids import EngineId
from fathom.core.ports.engine import Capabilities, DigestKind, ReceivesInto
from fathom.core.records.sampling import InFlightMode
from fathom.model.aligned import align
from fathom.model.language_model import LanguageModel
from fathom.model.paged_attention import PAGE_TOKENS, KvPages
from fathom.rollout.engines.embedded.messages import EngineConfigLine, Streamed, adapter_path
from fathom.rollout.engines.embedded.server.decode.decoder import Decoder
from fathom.rollout.engines.embedded.server.decode.draft.model_proposer import ModelProposer
from fathom.rollout.engines.embedded.server.decode.draft.ngram_proposer import NgramProposer
from fathom.rollout.engines.embedded.server.decode.draft.proposer import Proposer
from fathom.rollout.engines.embedded.server.decode.model_forward import ModelForward
from fathom.rollout.engines.embedded.server.engine_api import EngineApi, application
from fathom.rollout.engines.embedded.server.job import Stream
from fathom.rollout.engines.embedded.server.kv.kv_budget import kv_pages
from fathom.rollout.engines.embedded.server.scheduler import Calls, Scheduler, serve
from fathom.rollout.engines.embedded.server.weight_sets import WeightSets
from fathom.sync.adapters.adopt import AdapterStart, adopt
from fathom.text.tokenizer import Tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STEP_TOKENS = 512
"""Enough for a forward to run at full speed on a few cores, and few enough that those who decode do not wait long."""
_KEEP_ALIVE_S = 60
"""Much longer than the client keeps idle connections, so that none is closed here while a request is on its way."""
_SWITCH_S = 0.0005
"""How long the HTTP thread may be kept waiting for the interpreter by the decode loop, and the other way round."""


@final
class EngineServer:
    """One engine: its model is loaded when this exists."""

    def __init__(self, config: EngineConfigLine) -> None:
        """Load the model and take the memory for KV and weights.

        Raises:
            ConfigError: the engine cannot be built as configured.
        """
        torch.set_num_threads(config.threads)
        sys.setswitchinterval(_SWITCH_S)
        _raise_file_limit()
        self._loop = asyncio.new_event_loop()
        engine = EngineId(config.engine)
        loaded = _load(config)
        self.capabilities = _capabilities(config, loaded[0].decoder.has_experts)
        self._calls: Calls = queue.SimpleQueue()
        self._schedulers = [
            Scheduler(engine, self.capabilities, each.decoder, each.weights, self._deliver, each.adapter, self._calls)
            for each in loaded
        ]
        apis = [EngineApi(scheduler, engine, config.threads) for scheduler in self._schedulers]
        places = {adapter_path(form.name): api for form, api in zip(config.adapters, apis, strict=False)}
        self._app = application(places | ({"": apis[0]} if len(apis) == 1 else {}), config.token)

    def serve(self, listener: socket.socket) -> None:
        """Answer HTTP in a second thread, decode in this one. Never returns."""
        threading.Thread(target=self._answer_http, args=(listener,), daemon=True).start()
        serve(self._schedulers, self._calls)

    def _answer_http(self, listener: socket.socket) -> None:
        """Outside the main thread uvicorn leaves signals alone: SIGTERM simply ends the process, as it should."""
        settings = uvicorn.Config(
            self._app,
            lifespan="off",
            log_level="warning",
            access_log=False,
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        try:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(uvicorn.Server(settings).serve(sockets=[listener]))
        except Exception:  # noqa: BLE001 - the process is of no use without this thread: show why and end
            traceback.print_exc()
        os._exit(1)

    def _deliver(self, chunks: list[tuple[Stream, Streamed]]) -> None:
        self._loop.call_soon_threadsafe(_put_all, chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """The model, or the base with one adapter: with KV memory, slots and weights of its own."""

    decoder: Decoder
    weights: WeightSets
    adapter: AdapterIdentity | None


def _load(config: EngineConfigLine) -> list[_Loaded]:
    """One for each adapter, all over one base in memory; or one for the whole model."""
    folder, dtype = Path(config.model_folder), _DTYPES[config.dtype]
    if not config.adapters:
        return [_prepared(LanguageModel.load(folder, dtype, config.device), None, config)]
    models = LanguageModel.load_over_one_base(folder, dtype, config.device, len(config.adapters))
    return [_prepared(model, form, config) for model, form in zip(models, config.adapters, strict=True)]


def _prepared(model: LanguageModel, form: AdapterForm | None, config: EngineConfigLine) -> _Loaded:
    adapter = adopt(model, AdapterStart(form=form)) if form is not None else None
    if config.aligned:
        align(model)
    slots, tokens = config.max_running, config.max_context_tokens
    if tokens > model.shape.max_positions:
        raise ConfigError(
            f"a context of {tokens} tokens is more than the model's {model.shape.max_positions}; "
            "lower rollout.max_prompt_tokens or rollout.max_new_tokens"
        )
    pages = kv_pages(config.kv_memory_mb, model.shape, model.dtype, slots, tokens)
    kv = KvPages(model.shape, pages=pages, dtype=model.dtype, device=model.device)
    step_tokens = config.step_tokens or max(_STEP_TOKENS, 2 * slots)
    decoder = Decoder(
        EngineId(config.engine),
        ModelForward(model, kv),
        slots=slots,
        max_tokens=tokens,
        step_tokens=step_tokens,
        pages=pages,
        page_tokens=PAGE_TOKENS,
        decode=Tokenizer.load(Path(config.model_folder)).decode if _has_tokenizer(config) else None,
        proposer=_proposer(config, model, step_tokens),
        draft_tokens=config.draft_tokens,
    )
    return _Loaded(decoder=decoder, weights=WeightSets(model.weights()), adapter=adapter)


def _proposer(config: EngineConfigLine, model: LanguageModel, step_tokens: int) -> Proposer | None:
    match config.speculation:
        case Speculation.NONE:
            return None
        case Speculation.NGRAM:
            return NgramProposer()
        case Speculation.DRAFT_MODEL:
            assert config.draft_model_folder is not None, "the configuration names the model that drafts"
            return ModelProposer.load(
                Path(config.draft_model_folder),
                model,
                Path(config.model_folder),
                slots=config.max_running,
                max_tokens=config.max_context_tokens,
                step_tokens=step_tokens,
            )


def _capabilities(config: EngineConfigLine, routes: bool) -> Capabilities:
    return Capabilities(
        kept_sets=True,
        routes=routes,
        kv_versions=True,
        raw_logprobs=True,
        barriers=True,
        pinned_versions=True,
        double_buffered=True,
        receives_into=ReceivesInto.STAGING,
        in_flight=frozenset(InFlightMode),
        transports=frozenset(TransportKind),
        digest=DigestKind.MEMORY,
        max_context_tokens=config.max_context_tokens,
        logit_bias=True,
        adapters=True,
        stop_strings=_has_tokenizer(config),
        ids_scored=True,
    )


def _has_tokenizer(config: EngineConfigLine) -> bool:
    return (Path(config.model_folder) / "tokenizer.json").is_file()


def _put_all(chunks: list[tuple[Stream, Streamed]]) -> None:
    for stream, chunk in chunks:
        stream.put_nowait(chunk)


def _raise_file_limit() -> None:
    """Every generation in flight holds a connection: use all the open files that this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
