"""Flags of `fathom plan sync`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fathom.sync.plan.model_size import Served

File = Annotated[Path | None, typer.Argument(metavar="[FILE.toml]", help="a run's config: one host, its engines")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="options of it to change")]
Model = Annotated[
    Path | None,
    typer.Option("--model", metavar="DIR", help="Hugging Face folder or config.json; its parameters are counted"),
]
Params = Annotated[float | None, typer.Option("--params", metavar="N", help="parameters of a dense model, e.g. 8e9")]
Published = Annotated[
    str | None,
    typer.Option("--published", metavar="NAME", help="model and layouts of a published row, e.g. GLM-5; see --check"),
]
Dtype = Annotated[
    Served | None, typer.Option("--dtype", metavar="TYPE", help="bfloat16, float32 or fp8 [default: bfloat16]")
]
TrainerNodes = Annotated[
    int | None, typer.Option("--trainer-nodes", metavar="N", help="nodes of the trainer [default: one host for all]")
]
TrainerTp = Annotated[int | None, typer.Option("--trainer-tp", metavar="N", help="its tensor parallel size")]
TrainerPp = Annotated[int | None, typer.Option("--trainer-pp", metavar="N", help="its pipeline stages")]
TrainerCp = Annotated[int | None, typer.Option("--trainer-cp", metavar="N", help="its context parallel size")]
TrainerEp = Annotated[int | None, typer.Option("--trainer-ep", metavar="N", help="its expert parallel size")]
Engines = Annotated[
    int | None, typer.Option("--engines", metavar="N", help="engines on the trainer's own host [default: 1]")
]
EngineNodes = Annotated[
    int | None, typer.Option("--engine-nodes", metavar="N", help="nodes of the engines [default: one host for all]")
]
EngineTp = Annotated[int | None, typer.Option("--engine-tp", metavar="N", help="ranks of one engine")]
EngineEp = Annotated[int | None, typer.Option("--engine-ep", metavar="N", help="its expert parallel size")]
EngineDp = Annotated[
    int | None,
    typer.Option("--engine-dp", metavar="N", help="copies it keeps of all but the experts (attention data parallel)"),
]
GpusPerNode = Annotated[int | None, typer.Option("--gpus-per-node", metavar="N", help="GPUs of a node [default: 8]")]
FabricName = Annotated[
    str | None,
    typer.Option(
        "--fabric",
        metavar="NAME",
        help="loopback, ethernet-10g, infiniband-h100 [default: the first on one host, else the last]",
    ),
]
LinkGbps = Annotated[
    float | None,
    typer.Option("--link-gbps", metavar="X", help="gigabits a second of a rank's link, instead of its own"),
]
StorageMbps = Annotated[
    float | None,
    typer.Option("--storage-mbps", metavar="X", help="megabytes a second of the storage in all [default: 1000]"),
]
LearningRate = Annotated[
    float | None, typer.Option("--lr", metavar="X", help="learning rate: fixes how much changes [default: 1e-6]")
]
WeightStd = Annotated[
    float | None, typer.Option("--weight-std", metavar="X", help="standard deviation of the weights [default: 0.02]")
]
Density = Annotated[
    float | None, typer.Option("--density", metavar="X", help="share of elements that a step changes, instead of --lr")
]
DeltaRatio = Annotated[
    float | None, typer.Option("--delta-ratio", metavar="X", help="bytes of a delta over full bytes, instead of both")
]
EncodeMbps = Annotated[
    float | None,
    typer.Option("--encode-mbps", metavar="X", help="megabytes a second one host encodes [default: 800]"),
]
DecodeMbps = Annotated[
    float | None,
    typer.Option("--decode-mbps", metavar="X", help="megabytes a second one host decodes [default: 1600]"),
]
Live = Annotated[bool, typer.Option("--live", help="engines are written over while they are paused")]
Check = Annotated[
    bool, typer.Option("--check", help="predict every published figure, print the errors; needs nothing else")
]
Measured = Annotated[
    Path | None,
    typer.Option("--measured", metavar="FILE.json", help="a record of fathom bench sync: predicted beside measured"),
]
Pictures = Annotated[
    Path | None, typer.Option("--pictures", metavar="DIR", help="draw where one transport overtakes another")
]
