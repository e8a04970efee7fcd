"""A chain of versions of a tiny model, and a run whose ledger tells of them."""

from __future__ import annotations

from pathlib import Path

import torch

from fathom.config.sync import ChainConfig
from fathom.core.ids import PolicyVersion
from fathom.model.language_model import LanguageModel
from fathom.model.tiny import make_tiny
from fathom.sync.chain.store import Store
from fathom.sync.chain.writer import ChainWriter
from fathom.sync.digest import build_manifest
from fathom.sync.follow.model_files import keep_model_files
from fathom.text.characters import save_character_tokenizer
from synthetic.history import History, config


class ChainTrainer:
    """Appends versions of a tiny model to a chain; each changes one element of one tensor."""

    def __init__(self, folder: Path, store: Store, *, anchor_every: int = 100) -> None:
        torch.set_num_threads(1)
        folder.mkdir()
        save_character_tokenizer(folder)
        make_tiny("arithmetic", 0, folder)
        self.store = store
        self.weights = {
            name: tensor.detach().clone()
            for name, tensor in LanguageModel.load(folder, torch.float32, "cpu").weights().items()
        }
        self.parent: PolicyVersion | None = None
        self._writer = ChainWriter(store, ChainConfig(anchor_every=anchor_every))
        keep_model_files(store, folder)

    def publish(self, number: int, incarnation: int = 1, *, step: bool = True) -> PolicyVersion:
        """Append a version; without a `step` its weights are those of the one before."""
        if step:
            self.weights["model.norm.weight"][number % 100] += 0.5
        if self.parent is not None and self.parent.incarnation != incarnation:
            self.parent = None
        manifest = build_manifest(number, incarnation, self.parent, self.weights)
        self._writer.append(manifest, self.weights)
        self.parent = manifest.version
        return manifest.version


def write_run_with_chain(folder: Path) -> Path:
    """A run that was resumed: incarnation 1 made v0 to v5, incarnation 2 went on from step 3 and made v6 of it.

    v4 and v5 of incarnation 1 are undone. The chain holds a v9 of incarnation 2, too, that the ledger does not know.
    """
    folder.mkdir(parents=True)
    settings = config(steps=6)
    (folder / "config.json").write_text(settings.model_dump_json(exclude_unset=True))
    trainer = ChainTrainer(folder / "model", Store.of_run(folder, None), anchor_every=4)
    history = History(folder / "ledger")
    history.open(settings)
    history.publish(0, digest=trainer.publish(0).digest)
    parent_seq, at_checkpoint = 0, {}
    for number in range(1, 6):
        version = trainer.publish(number)
        history.train(number, history.group(number - 1), digest=version.digest)
        history.publish(number, digest=version.digest)
        if number == 3:
            parent_seq = history.checkpoint(3)
            at_checkpoint = {name: tensor.clone() for name, tensor in trainer.weights.items()}
    trainer.weights = at_checkpoint
    history.end(5, reason="stopped")
    history = History(folder / "ledger", resumed=True)
    history.open(settings, incarnation=2, parent_seq=parent_seq, step=3)
    history.publish(3, digest=trainer.publish(3, 2, step=False).digest)
    for number in range(4, 7):
        trainer.weights["model.embed_tokens.weight"][0, number] += 0.25
        version = trainer.publish(number, 2)
        history.train(number, history.group(number - 1), digest=version.digest)
        history.publish(number, digest=version.digest)
    trainer.publish(9, 2)
    history.end(6)
    return folder
