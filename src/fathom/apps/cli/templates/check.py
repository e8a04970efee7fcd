"""`fathom template check`: what holds of a chat template, and whether agents can go on from what was sampled."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from fathom.apps.cli.templates.view import report_view
from fathom.core.errors import ConfigError
from fathom.text.chat.renderer import TurnRenderer
from fathom.text.tokenizer import SpecialTokens, Tokenizer

NOT_APPENDABLE = 1
_LIMIT_S = 20.0

Source = Annotated[Path, typer.Argument(metavar="MODEL_OR_JINJA", help="a model folder, or a chat template's file")]
With = Annotated[
    Path | None, typer.Option("--tokenizer", metavar="DIR|FILE", help="for a template's file: whose tokens it writes")
]
Stops = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TOKEN", help="a token that ends an answer; repeatable [default: the folder's]"),
]

template = typer.Typer(no_args_is_help=True, help="Chat templates: how conversations become tokens.")


@template.callback()
def _group() -> None:
    """Keep `check` a command of a group while it is the only one."""


@template.command()
def check(source: Source, tokenizer: With = None, stop: Stops = None) -> None:
    """Say what holds of a chat template. Exit code 1: for some uses conversations are rendered as a whole each turn."""
    read = _read(source, tokenizer, tuple(stop or ()))
    with _limit(source):
        properties = TurnRenderer(read).properties
    Console().print(report_view(source.name, properties), highlight=False)
    if not properties.appendable:
        raise typer.Exit(NOT_APPENDABLE)


def _read(source: Path, tokenizer: Path | None, stops: tuple[str, ...]) -> Tokenizer:
    """The tokenizer with the template to be checked."""
    if source.is_dir():
        if tokenizer is not None:
            raise ConfigError(f"{source} is a model folder with a tokenizer of its own; leave out --tokenizer")
        return _stopping(Tokenizer.load(source), stops)
    if not source.is_file():
        raise ConfigError(f"{source} is neither a model folder nor the file of a chat template")
    if tokenizer is None:
        raise ConfigError(f"{source} is a template alone; add --tokenizer with a model folder or a tokenizer's file")
    if not tokenizer.exists():
        raise ConfigError(f"no tokenizer {tokenizer}; give --tokenizer a model folder or a tokenizer's file")
    try:
        text = source.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{source} is not text; give a chat template (.jinja) or a model folder") from None
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    if tokenizer.is_dir() or tokenizer.name == "tokenizer.json":
        return _stopping(Tokenizer.load(folder).with_template(text), stops)
    if not stops:
        raise ConfigError(f"{tokenizer} does not say which tokens end an answer; name them, as in --stop '</s>'")
    return _stopping(Tokenizer.load_file(tokenizer, text), stops)


def _stopping(tokenizer: Tokenizer, stops: tuple[str, ...]) -> Tokenizer:
    """Ending answers with these tokens, where any are named."""
    if not stops:
        return tokenizer
    vocabulary = tokenizer.vocabulary
    unknown = [stop for stop in stops if stop not in vocabulary]
    if unknown:
        raise ConfigError(f"the tokenizer has no token {unknown[0]!r}; give --stop a token as it is written")
    special = tokenizer.special
    ids = tuple(sorted({vocabulary[stop] for stop in stops}))
    return tokenizer.with_special(
        SpecialTokens(texts=special.texts, bos_id=special.bos_id, eos_id=special.eos_id, stop_ids=ids)
    )


@contextmanager
def _limit(source: Path) -> Generator[None]:
    """A template is a program: one that does not end is told, not waited for."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise ConfigError(f"{source} has not written a few short messages after {_LIMIT_S:g} s; does it loop for ever?")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
