"""How a run's weights travel, and who keeps every version of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fathom.config.families import TransportKind
from fathom.config.sync import SyncConfig
from fathom.core.errors import ConfigError, DeliveryError, PayloadError
from fathom.run.history.recorder import Recorder
from fathom.sync.chain.keeper import Keeper
from fathom.sync.chain.store import Store
from fathom.sync.chain.writer import ChainWriter, Trouble
from fathom.sync.follow.model_files import keep_model_files
from fathom.sync.transports import TRANSPORTS
from fathom.sync.transports.delta import DeltaTransport
from fathom.sync.transports.transport import Transport


def open_transport(
    run_folder: Path, model_folder: Path, config: SyncConfig, recorder: Recorder
) -> tuple[Transport, Keeper | None]:
    """The transport, and the keeper of the chain beside it. None: the transport is the chain, or none is kept.

    Config and tokenizer of `model_folder` are put beside the chain, so that its versions are of use by themselves.
    To be called in the event loop, where troubles of the chain are recorded.

    Raises:
        ConfigError: the chain's store cannot be used.
    """
    trouble = _recorded(recorder)
    if config.transport is TransportKind.DELTA:
        return DeltaTransport(_open_chain(run_folder, model_folder, config, trouble), trouble), None
    keeper = None
    if config.chain.budget_mb > 0:
        keeper = Keeper(_open_chain(run_folder, model_folder, config, trouble), trouble, config.timeout_s)
    return TRANSPORTS[config.transport](run_folder, config), keeper


def _open_chain(run_folder: Path, model_folder: Path, config: SyncConfig, trouble: Trouble) -> ChainWriter:
    try:
        store = Store.of_run(run_folder, config.chain.store)
        keep_model_files(store, model_folder)
        return ChainWriter(store, config.chain, trouble)
    except (DeliveryError, PayloadError) as error:
        raise ConfigError(f"the chain of versions: {error}; set sync.chain.store to another place") from error


def _recorded(recorder: Recorder) -> Trouble:
    """Trouble comes from other threads; the ledger has one writer."""
    loop = asyncio.get_running_loop()

    def record(error: Exception) -> None:
        loop.call_soon_threadsafe(recorder.fault, "chain of versions", error)

    return record
