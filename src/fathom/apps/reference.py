"""Reference pages made from the code: `python -m fathom.apps.reference options` or `cli`, as Markdown."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from fathom.apps.cli.main import app
from fathom.bench.workloads import WORKLOADS
from fathom.config.load import TABLE_KEY, is_table, nested_section
from fathom.config.run import RunConfig
from fathom.envs.registry import BUILT_IN
from fathom.run.tuning.plan import KINDS

_SIMPLE = {str: "text", int: "int", float: "float", bool: "bool", type(None): "none"}

_OPTIONS_HEAD = """\
# Options

Made from the config models by `python -m fathom.apps.reference options`; do not edit it.

A run's file is TOML: the options of a section stand under its heading. On the command line an option has its dotted
name: `fathom train FILE.toml trainer.steps=50`. Unknown options are refused. An option without a default is required;
*none* is said by leaving the option out. `fathom train FILE.toml --dry-run` prints the resolved tree.
"""

_TASKS_HEAD = """\
## Options of the built-in tasks

They stand under `[task.options]`. A task of one's own declares its options itself
([how](../how-to/own-task.md)).
"""

_TUNING_HEAD = """\
## Options of `fathom sft` and `fathom dpo`

Their files are TOML too; an option that stands in a table has its dotted name here.
"""

_TABLE = "| option | type | default | |\n|---|---|---|---|\n"

_BENCHES_HEAD = """\
## Options of the benches

They are given on the command line: `fathom bench pipeline steps=24`.
"""

_CLI_HEAD = """\
# Command line

Made from the commands by `python -m fathom.apps.reference cli`; do not edit it.

Exit codes: 0 done; 1 failed (`audit`: a contract is broken; `bench`: a required target was missed; `doctor`: this
machine cannot run Fathom); 2 the input is wrong and nothing was started; 130 and 143 the run was asked to end by
SIGINT or SIGTERM. Options written `KEY=VALUE` are [listed apart](options.md).
"""


def options_page() -> str:
    """`docs/reference/options.md`."""
    sections = "".join(_section(RunConfig, "", None))
    tasks = "".join(_owned(f'task.kind = "{kind}"', model.__doc__, model) for kind, (model, _) in BUILT_IN.items())
    tuning = "".join(_tuning(kind, root) for kind, root in KINDS.items())
    benches = "".join(
        _owned(f"fathom bench {name}", workload.about, workload.options) for name, workload in WORKLOADS.items()
    )
    parts = (f"{_OPTIONS_HEAD}\n{sections}", f"{_TUNING_HEAD}\n{tuning}", f"{_TASKS_HEAD}\n{tasks}")
    return f"{''.join(parts)}{_BENCHES_HEAD}\n{benches}".rstrip() + "\n"


def _tuning(kind: str, root: type[BaseModel]) -> str:
    """All options of a kind of run, by their dotted names."""
    return f"### `fathom {kind}`\n\n{_one_line(root.__doc__ or '')}\n\n{_TABLE}{''.join(_rows(root, '', None))}\n"


def _rows(section: type[BaseModel], prefix: str, default: Any) -> Iterator[str]:
    for key, field in section.model_fields.items():
        model = nested_section(field.annotation)
        if model is None:
            yield _row(f"{prefix}{key}", field, field.default if default is None else vars(default)[key])
        else:
            given = field.default if isinstance(field.default, BaseModel) else None
            yield from _rows(model, f"{prefix}{key}.", given if default is None else vars(default)[key])


def cli_page() -> str:
    """`docs/reference/cli.md`."""
    return f"{_CLI_HEAD}\n{''.join(_commands(get_command(app), 'fathom'))}".rstrip() + "\n"


def _section(section: type[BaseModel], name: str, default: Any) -> Iterator[str]:
    """A heading and a table, then the same of each section in it. `default`: what the section is when left out."""
    fields = section.model_fields.items()
    nested = [(key, field, model) for key, field in fields if (model := nested_section(field.annotation))]
    plain = [(key, field) for key, field in fields if nested_section(field.annotation) is None]
    heading = f"## `[{name}]`" if name else "## At the top of the file"
    intro = _one_line(section.__doc__ or "")
    yield f"{heading}\n\n{intro}\n\n"
    if plain:
        yield "| option | type | default | |\n|---|---|---|---|\n"
        for key, field in plain:
            own = field.default if default is None else vars(default)[key]
            yield _row(f"{name}.{key}" if name else key, field, own)
        yield "\n"
    for key, field, model in nested:
        given = field.default if isinstance(field.default, BaseModel) else None
        inner = given if default is None else vars(default)[key]
        path = f"{key}{TABLE_KEY if is_table(field.annotation) else ''}"
        yield from _section(model, f"{name}.{path}" if name else path, inner)


def _owned(owner: str, about: str | None, model: type[BaseModel]) -> str:
    """The options that a task or a bench declares for itself."""
    rows = "".join(_owned_rows(model, ""))
    head = f"### `{owner}`\n\n{_one_line(about or '')}\n\n"
    return f"{head}| option | type | default | |\n|---|---|---|---|\n{rows}\n"


def _owned_rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Rows of a section, each followed by those of the section that it is, if it is one."""
    for key, field in model.model_fields.items():
        yield _row(f"{prefix}{key}", field, field.default)
        if (inner := nested_section(field.annotation)) is not None:
            yield from _owned_rows(inner, f"{prefix}{key}.")


def _row(name: str, field: FieldInfo, default: Any) -> str:
    given = "required" if default is PydanticUndefined and field.default_factory is None else _value(field, default)
    limits = " and ".join(limit for part in field.metadata if (limit := _limit(part)))
    kind = _kind(field.annotation) + (f", {limits}" if limits else "")
    return f"| `{name}` | {kind} | {given} | {_one_line(field.description or '')} |\n"


def _limit(part: object) -> str:
    """A bound in words. Empty: the constraint is no bound."""
    match part:
        case Gt():
            return f"> {part.gt}"
        case Ge():
            return f">= {part.ge}"
        case Lt():
            return f"< {part.lt}"
        case Le():
            return f"<= {part.le}"
        case _:
            return ""


def _value(field: FieldInfo, default: Any) -> str:
    if default is PydanticUndefined:
        default = field.get_default(call_default_factory=True, validated_data={})
    return "none" if default is None else f"`{json.dumps(default)}`"


def _kind(annotation: Any) -> str:
    """A type in words that a TOML file can follow."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (types.UnionType, Union):
        return " or ".join(_kind(part) for part in parts if part is not type(None))
    if origin is tuple:
        return f"list of {_kind(parts[0])}"
    if origin is Literal:
        return ", ".join(f"`{json.dumps(part)}`" for part in parts)
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return ", ".join(f'`"{member}"`' for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _SIMPLE.get(annotation, "value")


def _commands(command: Any, name: str) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        for sub_name, sub in command.commands.items():
            yield from _commands(sub, f"{name} {sub_name}")
    else:
        yield _command(command, name)


def _command(command: TyperCommand, name: str) -> str:
    arguments = [p for p in command.params if not isinstance(p, TyperOption)]
    options = [p for p in command.params if isinstance(p, TyperOption)]
    usage = " ".join(
        [name, *(p.metavar or str(p.name).upper() for p in arguments), *(["[OPTIONS]"] if options else [])]
    )
    about = (command.help or "").split("\n\n")[0]
    lines = [f"## `{name}`\n", f"    {usage}\n", f"{_one_line(about)}\n"]
    if command.params:
        lines.append("| | |\n|---|---|")
        lines += [f"| `{p.metavar or str(p.name).upper()}` | {_one_line(_help(p))} |" for p in arguments]
        lines += [f"| `{_spelling(p)}` | {_one_line(_help(p))} |" for p in options]
        lines.append("")
    return "\n".join(lines) + "\n"


def _spelling(option: TyperOption) -> str:
    return ", ".join(option.opts) + ("" if option.is_flag else f" {option.metavar or 'VALUE'}")


def _help(parameter: Any) -> str:
    text, default = str(parameter.help or ""), parameter.default
    shown = "" if default is None or default is False or "[default" in text else f" [default: {default}]"
    return text + shown


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {"options": options_page, "cli": cli_page}
"""What each page is called."""

if __name__ == "__main__":
    if sys.argv[1:] not in [[name] for name in PAGES]:
        sys.exit(f"name one page: {', '.join(PAGES)}")
    sys.stdout.write(PAGES[sys.argv[1]]())
