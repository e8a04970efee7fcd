"""Which tensors a version must consist of, told from the model's folder, since vLLM has fused its own."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from fathom.core.errors import ConfigError, PayloadError
from fathom.core.manifest import Manifest
from fathom.sync.quantise.formats import check_known

Form = tuple[str, tuple[int, ...]]
"""Element type as safetensors writes it, and shape."""

_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_FLOATS = ("F64", "F32", "F16", "BF16")
_HEAD, _SHOWN = "lm_head.weight", 5


def expected_tensors(folder: Path, dtype: str) -> dict[str, Form]:
    """Names and forms of a version of this model in `dtype`; a tied head has no tensor of its own.

    Raises:
        ConfigError: the folder has no weights or no config.
    """
    found: dict[str, Form] = {}
    try:
        tied = bool(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings", False))
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    piece = file.get_slice(name)
                    kind = piece.get_dtype()
                    found[name] = (_DTYPES[dtype] if kind in _FLOATS else kind, tuple(piece.get_shape()))
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"model folder {folder} cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"model folder {folder} has no weights (*.safetensors); is its download complete?")
    if tied:
        found.pop(_HEAD, None)
    return found


def check_fit(manifest: Manifest, expected: dict[str, Form]) -> None:
    """Raise `PayloadError`, naming the tensor, unless the manifest has exactly the expected names and forms."""
    offered = {entry.name: (entry.dtype, entry.shape) for entry in manifest.tensors}
    missing, unknown = sorted(expected.keys() - offered.keys()), sorted(offered.keys() - expected.keys())
    if missing or unknown:
        raise PayloadError(
            f"{manifest.version.name} does not fit the engine's model: without a value {missing[:_SHOWN]}, without a "
            f"place {unknown[:_SHOWN]}; publish the same model, tied names resolved to one"
        )
    for name, form in offered.items():
        if form != expected[name]:
            raise PayloadError(f"tensor {name!r} is {form} in {manifest.version.name}, {expected[name]} in the engine")
    check_known(manifest, {})
