"""Chat templates are programs of strangers: they run in a sandbox, with what `transformers` gives them, no more."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn, final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fathom.core.errors import ConfigError

FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What the program of a stranger may end with."""
_LONGEST, _HIGHEST_POWER = 10**7, 64


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template. Raises ConfigError when it is not a valid one."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, LoopControlExtension])
    environment.filters["tojson"] = _to_json
    functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    try:
        return environment.from_string(source, globals=functions)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"line {error.lineno} of the chat template: {error.message}") from error


@final
class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses products that could fill the memory at once."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See the library. Raises SecurityError."""
        repeated = operator == "*" and _times(left, right) > _LONGEST
        if repeated or (operator == "**" and not (isinstance(right, int) and abs(right) <= _HIGHEST_POWER)):
            raise SecurityError(f"{left!r:.20} {operator} {right!r:.20} may be too large")
        return super().call_binop(context, operator, left, right)


@final
class GenerationBlocks(Extension):
    """Accepts `{% generation %}` ... `{% endgeneration %}`, which mark the assistant's words and add none."""

    tags = {"generation"}  # noqa: RUF012  the library's own declaration, read from the class

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _times(left: Any, right: Any) -> int:
    """Length of a sequence repeated. 0: a product of numbers."""
    for sequence, number in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(number, int):
            return len(sequence) * number  # pyright: ignore[reportUnknownArgumentType]
    return 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; the library's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
