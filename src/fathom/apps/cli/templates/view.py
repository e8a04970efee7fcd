"""The report of a chat template as a page."""

from __future__ import annotations

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from fathom.text.chat.properties import TemplateProperties
from fathom.text.chat.reading.written import ChannelCalls, JsonCalls, MarkedCalls, TaggedCalls

_SHOWN = 60


def report_view(name: str, properties: TemplateProperties) -> Group:
    """A table of what holds, one of what can be gone on from, and a sentence."""
    held = Table(box=None, show_header=False, pad_edge=False)
    held.add_column(style="bold", no_wrap=True)
    held.add_column()
    for title, said in _rows(properties):
        held.add_row(title, escape(said))
    uses = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("what follows an answer", "goes on from what was sampled"):
        uses.add_column(title)
    for use, reason in properties.uses.items():
        if use in properties.meant:
            uses.add_row(use.value, "yes" if not reason else f"[yellow]no:[/] {escape(reason)}")
    return Group(held, "", uses, "", f"[bold]{escape(name)}[/] {verdict(properties)}")


def verdict(properties: TemplateProperties) -> str:
    """One sentence."""
    refused = [use for use in properties.meant if properties.uses[use]]
    if not refused:
        return "is appendable: a turn costs its new tokens, and a conversation gives one training row."
    whole = "the conversation is then rendered as a whole, and opens a training row of its own"
    if len(refused) == len(properties.meant):
        return f"is not appendable: each turn opens a training row of its own; {whole}."
    return f"is appendable, but for {len(refused)} of {len(properties.meant)} uses: {whole}."


def _rows(properties: TemplateProperties) -> list[tuple[str, str]]:
    end = _shown(properties.turn_end) or "none: the next message's beginning ends it"
    if properties.stop_opens_next:
        end += "; a stop token opens the next message and is written once"
    elif properties.sampled_end and not properties.turn_end.startswith(properties.sampled_end):
        end += f"; sampled: {_shown(properties.sampled_end)}"
    elif not properties.sampled_end:
        end += "; no stop token is part of it"
    begins = _shown(properties.begins) or "nothing"
    if properties.tokenizer_begins and not properties.begins:
        begins += "; the tokenizer's own beginning is left out, as with any template"
    calls = {"": "not written"}.get(properties.calls_as, f"arguments given as {properties.calls_as}")
    if properties.calls_as:
        calls += ", several at once" if properties.calls_at_once else ", one a message"
    thoughts = properties.thoughts
    marks = f"{thoughts.opens} ... {thoughts.closes}" if thoughts else "none"
    if thoughts and thoughts.opened_by_prompt:
        marks += ", opened by the prompt"
    if isinstance(properties.calls, ChannelCalls):
        marks = "in a channel of their own"
    return [
        ("turn end", end),
        ("begins with", begins),
        ("adds in front", _shown(properties.adds_in_front) or "nothing"),
        ("opens an answer", _shown(properties.opens_with) or "with nothing"),
        ("strips words of", ", ".join(properties.strips) or "nobody"),
        ("calls of tools", calls),
        ("calls are read as", _format(properties)),
        ("between results", _shown(properties.between_results) or "does not write two"),
        ("thoughts", marks),
    ]


def _format(properties: TemplateProperties) -> str:
    match properties.calls:
        case JsonCalls(opens=opens, closes=closes):
            return f"JSON between {opens} and {closes}" if opens else "a JSON object"
        case MarkedCalls(opens=opens, closes=closes):
            return f"name and JSON between {_shown(opens)} and {_shown(closes)}"
        case TaggedCalls(opens=opens, key_opens=key):
            return f"arguments in tags of their own: {opens} {key}"
        case ChannelCalls():
            return "messages to a tool, in channels"
        case None:
            return "text only: no known way to write a call"


def _shown(text: str) -> str:
    written = text.replace("\n", "\\n")
    return written if len(written) <= _SHOWN else written[: _SHOWN - 1] + "…"
