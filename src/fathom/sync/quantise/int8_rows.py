"""The plain reference of a quantiser: 8-bit integers, with one scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from fathom.core.errors import PayloadError
from fathom.core.manifest import TensorFormat
from fathom.sync.digest import dtype_name
from fathom.sync.quantise.quantiser import Quantised

INT8_ROWS = "int8_rows"
"""Name of the format: int8 [..., K] and float32 scales [...], value = code * scale."""

_LARGEST = 127


@final
class Int8Rows:
    """Codes every floating tensor of two or more dimensions, symmetrically; ties go to the even code.

    >>> quantised = Int8Rows().apply({"w": torch.tensor([[1.0, -2.54]])})
    >>> quantised.tensors["w"].tolist(), sorted(quantised.tensors)
    ([[50, -127]], ['w', 'w.scale'])
    """

    def apply(self, tensors: Mapping[str, Tensor]) -> Quantised:
        """See `Quantiser.apply`."""
        coded: dict[str, Tensor] = {}
        formats: dict[str, TensorFormat] = {}
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or tensor.dim() < 2:
                coded[name] = tensor
                continue
            scales = f"{name}.scale"
            coded[name], coded[scales] = _code(name, tensor)
            formats[name] = TensorFormat(name=INT8_ROWS, dtype=dtype_name(name, tensor), scales=(scales,))
        return Quantised(tensors=coded, formats=formats)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., K] from int8 [..., K] and float32 [...]."""
    return codes.float() * scales.unsqueeze(-1)


def _code(name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
    values = tensor.detach().float()
    largest = values.abs().amax(-1) if values.shape[-1] else values.new_zeros(values.shape[:-1])
    if not bool(torch.isfinite(largest).all()):
        raise PayloadError(f"tensor {name!r} has values that are not finite: they have no code; look at the last step")
    scales = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))
    codes = torch.round(values / scales.unsqueeze(-1)).clamp_(-_LARGEST, _LARGEST)
    return codes.to(torch.int8), scales
