"""Versions of the tiny model for engines under test."""

from pathlib import Path

import torch

from fathom.core.adapter import AdapterForm
from fathom.core.manifest import Manifest, WeightSource
from fathom.model.aligned import align
from fathom.model.language_model import LanguageModel
from fathom.model.tiny import make_tiny
from fathom.sync.adapters.adopt import AdapterStart, adopt
from fathom.sync.digest import build_manifest
from fathom.sync.transports.transport import Transport
from fathom.text.characters import save_character_tokenizer


def tiny_folder(folder: Path) -> Path:
    torch.set_num_threads(1)
    save_character_tokenizer(folder)
    make_tiny("arithmetic", 0, folder)
    return folder


class Shelf:
    """Version n is the folder's weights with noise of seed n."""

    def __init__(
        self,
        folder: Path,
        transport: Transport,
        dtype: torch.dtype = torch.float32,
        aligned: bool = False,
        adapter: AdapterForm | None = None,
    ) -> None:
        self.model = LanguageModel.load(folder, dtype, "cpu")
        self.adapter = None if adapter is None else adopt(self.model, AdapterStart(form=adapter))
        """Versions are of it. None: of the whole model."""
        if aligned:
            align(self.model)
        self.tolerance = 0.0 if aligned else 1e-5
        """In nats, between ways to compute the same token; also how far a uniform may lie from what it needs."""
        self._base = {name: tensor.detach().clone() for name, tensor in self.model.weights().items()}
        self._transport = transport

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            for name, tensor in self._base.items()
        }

    async def publish(self, number: int) -> tuple[Manifest, WeightSource]:
        return await self.publish_weights(number, self.weights(number))

    async def publish_weights(self, number: int, weights: dict[str, torch.Tensor]) -> tuple[Manifest, WeightSource]:
        manifest = build_manifest(number, 1, None, weights, adapter=self.adapter)
        self._transport.hold(manifest, weights)
        source = self._transport.offer(manifest.version, [])
        self._transport.release(manifest.version)
        return manifest, source
