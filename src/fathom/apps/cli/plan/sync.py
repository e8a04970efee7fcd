"""`fathom plan sync`: which transport to use, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import typer
from rich.console import Console, Group

from fathom.apps.cli.arguments import AsJson
from fathom.apps.cli.plan import flags
from fathom.apps.cli.plan.view import advice_view, check_view, forecast_view
from fathom.config.load import load_config
from fathom.core.errors import ConfigError
from fathom.sync.plan.advice import advise
from fathom.sync.plan.picture import draw_pictures
from fathom.sync.plan.published import check
from fathom.sync.plan.question import Question, Split, scenario_of

plan = typer.Typer(no_args_is_help=True, help="What a choice would cost, before it is made.")


@plan.callback()
def _group() -> None:
    """Keep `sync` a command of a group while it is the only one."""


@plan.command()
def sync(
    file: flags.File = None,
    overrides: flags.Overrides = None,
    model: flags.Model = None,
    params: flags.Params = None,
    published: flags.Published = None,
    dtype: flags.Dtype = None,
    trainer_nodes: flags.TrainerNodes = None,
    trainer_tp: flags.TrainerTp = None,
    trainer_pp: flags.TrainerPp = None,
    trainer_cp: flags.TrainerCp = None,
    trainer_ep: flags.TrainerEp = None,
    engines: flags.Engines = None,
    engine_nodes: flags.EngineNodes = None,
    engine_tp: flags.EngineTp = None,
    engine_ep: flags.EngineEp = None,
    engine_dp: flags.EngineDp = None,
    gpus_per_node: flags.GpusPerNode = None,
    fabric: flags.FabricName = None,
    link_gbps: flags.LinkGbps = None,
    storage_mbps: flags.StorageMbps = None,
    lr: flags.LearningRate = None,
    weight_std: flags.WeightStd = None,
    density: flags.Density = None,
    delta_ratio: flags.DeltaRatio = None,
    encode_mbps: flags.EncodeMbps = None,
    decode_mbps: flags.DecodeMbps = None,
    live: flags.Live = False,
    check_published: flags.Check = False,
    measured: flags.Measured = None,
    pictures: flags.Pictures = None,
    as_json: AsJson = False,
) -> None:
    """Say which transport to use and why, with an estimate for each phase of each."""
    question = Question(
        model=model,
        params=params,
        served=dtype,
        trainer_nodes=trainer_nodes,
        trainer=Split(tp=trainer_tp, pp=trainer_pp, cp=trainer_cp, ep=trainer_ep),
        engines=engines,
        engine_nodes=engine_nodes,
        engine=Split(tp=engine_tp, ep=engine_ep, dp=engine_dp),
        gpus_per_node=gpus_per_node,
        fabric=fabric,
        link_gbps=link_gbps,
        storage_mbps=storage_mbps,
        learning_rate=lr,
        weight_std=weight_std,
        density=density,
        delta_ratio=delta_ratio,
        encode_mbps=encode_mbps,
        decode_mbps=decode_mbps,
        live=live,
    )
    if check_published or measured is not None:
        asked = question != Question() or any(said is not None for said in (file, published, pictures))
        if asked or (check_published and measured is not None):
            raise ConfigError("--check and --measured stand alone; leave out what else was given")
        return _show_check(as_json) if measured is None else _show_forecast(as_json, measured)
    run = None if file is None else load_config(file, overrides or [])
    scenario = scenario_of(question, run, published)
    advice = advise(scenario)
    _show(as_json, advice, lambda: advice_view(scenario, advice))
    for drawn in [] if pictures is None else draw_pictures(pictures, scenario):
        typer.echo(drawn, err=True)


def _show_check(as_json: bool) -> None:
    checked = check()
    _show(as_json, checked, lambda: check_view(checked))


def _show_forecast(as_json: bool, record: Path) -> None:
    from fathom.bench.forecast import forecast_of

    forecasts = forecast_of(record)
    _show(as_json, forecasts, lambda: forecast_view(forecasts))


def _show(as_json: bool, answer: object, view: Callable[[], Group]) -> None:
    """As JSON or as a page."""
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
    else:
        Console(soft_wrap=False).print(view(), highlight=False)
