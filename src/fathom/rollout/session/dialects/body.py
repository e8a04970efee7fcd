"""Reading the body of a request, strictly: what is not known is refused by name, what cannot be honoured, too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, TypeVar

import msgspec

from fathom.core.records.bias import LogitBias
from fathom.core.records.sampling import SamplingParams
from fathom.rollout.session.call import CallRefusedError, Refusal
from fathom.rollout.session.dialects.dialect import Terms

Body = TypeVar("Body", bound=msgspec.Struct)

_VERBATIM = frozenset({"parameters", "input_schema", "input"})
"""Objects that are somebody's own: nothing in them is left out."""
_LONGEST_SHOWN = 60
_LARGEST = 2**31 - 1
"""Of a token id, and so of a number of tokens."""
_MOST_STOP_STRINGS = 16
_MOST_SCHEMAS = 1024


def read_body(
    body: bytes, kind: type[Body], terms: Terms, *, changes_nothing: Iterable[str], neutral: Mapping[str, Sequence[Any]]
) -> Body:
    """A body as a `kind`, whose fields are what is honoured.

    Args:
        body: JSON.
        kind: the type; its fields are the parameters that are honoured.
        terms: parameters to leave out are in it.
        changes_nothing: parameters that have no influence on the answer.
        neutral: by parameter, the values at which it has none. `null` is one for every parameter.

    Raises:
        CallRefusedError: it is malformed, or a parameter cannot be honoured.
    """
    given = _decode(body, dict[str, msgspec.Raw])
    honoured, free = set(kind.__struct_fields__), set(changes_nothing) | terms.ignored
    for name, raw in given.items():
        if name in free or (name in honoured and name not in terms.ignored):
            continue
        value = _decode(raw, object)
        if value is not None and value not in neutral.get(name, ()):
            raise unsupported(name, value)
    kept = {name: raw for name, raw in given.items() if name in honoured and name not in terms.ignored}
    return _decode(body if len(kept) == len(given) else msgspec.json.encode(kept), kind)


def unsupported(name: str, value: object) -> CallRefusedError:
    """The refusal of a parameter."""
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= _LONGEST_SHOWN else shown[:_LONGEST_SHOWN] + "..."
    return CallRefusedError(
        Refusal.UNSUPPORTED,
        f"{name} = {shown} cannot be honoured here; leave it out of the request, or have the session server ignore "
        f"{name.rpartition('.')[2]!r}",
        name,
    )


def not_text(name: str, kind: str) -> CallRefusedError:
    """The refusal of a part of a message that is no text. `name`: where it stands."""
    return CallRefusedError(
        Refusal.UNSUPPORTED, f"{name}: parts of type {kind!r} are not served; this model reads text only", name
    )


def sampling_of(
    terms: Terms,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    logit_bias: Mapping[str, float] | None = None,
) -> SamplingParams | None:
    """The session's distribution with what a request overrides. None: it overrides nothing."""
    given: dict[str, float | int | LogitBias | None] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": None if top_k is None else max(top_k, 0),  # some clients say -1 for all
        "min_p": min_p,
    }
    try:
        given["logit_bias"] = _bias(logit_bias) if logit_bias else None
        if top_k is not None and top_k > _LARGEST:
            raise ValueError(f"top_k must be at most {_LARGEST}, got {top_k}")
        changed = {name: value for name, value in given.items() if value is not None}
        return msgspec.structs.replace(terms.sampling, **changed) if changed else None
    except ValueError as error:
        raise CallRefusedError(
            Refusal.UNSUPPORTED, f"{error}; leave it out to sample as the session does", str(error).partition(" ")[0]
        ) from error


def stop_strings(given: str | Sequence[str] | None, name: str) -> tuple[str, ...]:
    """Texts that end an answer. `name`: the parameter's."""
    texts = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    if "" in texts or len(texts) > _MOST_STOP_STRINGS:
        raise CallRefusedError(Refusal.INVALID, f"{name}: at most {_MOST_STOP_STRINGS} texts, none of them empty", name)
    return texts


def at_least_one(count: int | None, name: str) -> int | None:
    """A number of tokens."""
    if count is not None and count < 1:
        raise CallRefusedError(Refusal.INVALID, f"{name} must be at least 1, got {count}", name)
    return count


def _bias(given: Mapping[str, float]) -> LogitBias:
    try:
        entries = sorted((int(token), float(value)) for token, value in given.items())
        if entries[-1][0] > _LARGEST:
            raise ValueError(f"{entries[-1][0]} is no token id")
        return LogitBias(ids=tuple(token for token, _ in entries), values=tuple(value for _, value in entries))
    except ValueError as error:
        raise ValueError(f"logit_bias is of no use: {error}") from error


@lru_cache(_MOST_SCHEMAS)
def schema(given: bytes, name: str) -> msgspec.Raw:
    """What a tool takes, as sent; templates and readers may rely on its being a JSON object. `name`: where it stands.

    Tools are sent with every call, and checked once.
    """
    if not isinstance(_decode(given, object), dict):
        raise CallRefusedError(Refusal.INVALID, f"{name}: a JSON schema is an object", name)
    return msgspec.Raw(given)


@cache
def _decoder(kind: type) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _decode(body: bytes, kind: type[Any]) -> Any:
    """Fields that are `null` are as good as left out, also those that are unknown: clients send back what they got."""
    try:
        try:
            return _decoder(kind).decode(body)
        except msgspec.ValidationError:
            return _decoder(kind).decode(msgspec.json.encode(_without_nulls(msgspec.json.decode(body))))
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        unknown = str(error).startswith("Object contains unknown field")
        raise CallRefusedError(
            Refusal.UNSUPPORTED if unknown else Refusal.INVALID,
            f"{error or type(error).__name__}" + ("; it cannot be honoured here, leave it out" if unknown else ""),
            str(error).partition("`$.")[2].rstrip("`") or "body",
        ) from error


def _without_nulls(value: object) -> object:
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: each if name in _VERBATIM and isinstance(each, dict) else _without_nulls(each)
        for name, each in value.items()
        if each is not None
    }
