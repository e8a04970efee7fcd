"""Why a request cannot be served, whichever engine is asked. Checked before anything is computed."""

from __future__ import annotations

import numpy as np

from fathom.core.errors import RecordError
from fathom.core.ids import PolicyVersion
from fathom.core.ports.engine import Capabilities, GenerateRequest, ScoreRequest
from fathom.core.records.bias import TokenBias
from fathom.core.records.scores import IdLists
from fathom.core.records.trajectory import KeptSets
from fathom.rollout.engines.stop_strings import UNFINISHED


def why_not_generate(request: GenerateRequest, capabilities: Capabilities, vocab_size: int) -> str | None:
    """What is wrong with a generation request. None: nothing."""
    prompt, limit = request.prompt_ids, capabilities.max_context_tokens
    if prompt.dtype != np.int32 or prompt.ndim != 1 or len(prompt) < 1 or request.max_new_tokens < 1:
        return "a generation needs int32 prompt ids, at least one, and max_new_tokens >= 1"
    if len(prompt) >= limit:
        return f"a prompt of {len(prompt)} tokens leaves no room in its context of {limit}; shorten it"
    if wrong := _outside([prompt.min(), prompt.max(), *request.stop_ids], vocab_size):
        return wrong
    if not -(2**63) <= request.priority < 2**63:
        return f"the priority {request.priority} does not fit 64 bits, signed"
    if not 0 <= request.seed < 2**64:
        return f"the seed {request.seed} does not fit 64 bits, unsigned"
    bias = request.sampling.logit_bias
    if bias is not None and (wrong := _outside([bias.ids[0], bias.ids[-1]], vocab_size)):
        return wrong
    if not all(request.stop_strings) or any(UNFINISHED in stop for stop in request.stop_strings):
        return "a stop string is empty, or has a U+FFFD, which stands for bytes that are no character; leave it out"
    for asked, able, name in (
        (bool(request.stop_strings), capabilities.stop_strings, "stop_strings"),
        (bias is not None, capabilities.logit_bias, "logit_bias"),
        (request.want_routes, capabilities.routes, "routes"),
        (request.want_raw_logprobs, capabilities.raw_logprobs, "raw_logprobs"),
        (request.pinned is not None, capabilities.pinned_versions, "pinned_versions"),
        (request.barrier is not None, capabilities.barriers, "barriers"),
    ):
        if asked and not able:
            return f"it does not have the capability `{name}`; choose an engine that declares it"
    return None


def why_not_version(request: GenerateRequest, serving: PolicyVersion) -> str | None:
    """Why an engine that serves `serving` is not new enough for a generation. None: it is, or any will do.

    Versions only become newer, so what was new enough on arrival is so for every token.
    """
    least = request.at_least
    if least is None:
        return None
    if request.pinned is not None:
        return f"it demands exactly {request.pinned.name} and at least {least.name}; demand one of the two"
    if serving.order < least.order:
        return f"it serves {serving.name}, and at least {least.name} is demanded; send it once that is published"
    if serving.order == least.order and serving != least:
        return (
            f"it serves {serving.name} with the digest {serving.digest}, and {least.name} with the digest "
            f"{least.digest} is demanded; they are of two runs"
        )
    return None


def not_held(pinned: PolicyVersion, serving: PolicyVersion) -> str:
    """What an engine says that is asked for exactly a version which it does not hold."""
    return f"it serves {serving.name} and does not hold {pinned.name}; pin a version while it serves"


def why_not_score(request: ScoreRequest, capabilities: Capabilities, vocab_size: int) -> str | None:
    """What is wrong with a scoring request. None: nothing."""
    total, count, limit = len(request.token_ids), len(request.positions), capabilities.max_context_tokens
    if total > limit:
        return f"{total} tokens to score are more than its context of {limit}"
    if request.token_ids.dtype != np.int32 or request.positions.dtype != np.int64:
        return "scoring needs int32 token ids and int64 positions"
    if request.token_ids.ndim != 1 or request.positions.ndim != 1:
        return "token ids and positions to score are one row each; send one request for each sequence"
    if not count or request.positions.min() < 1 or request.positions.max() >= total:
        return f"positions to score must be within [1, {total}), at least one: the first token has no left context"
    temperature = request.temperature
    if temperature.dtype != np.float32 or temperature.shape != (count,) or not np.all(np.isfinite(temperature)):
        return "scoring needs one finite float32 temperature for each position"
    if not np.all(temperature > 0):
        return "scoring needs temperatures > 0"
    if request.kept is not None and (wrong := _wrong_kept(request, request.kept)):
        return wrong
    if request.bias is not None and (wrong := _wrong_bias(request.bias, count, capabilities, vocab_size)):
        return wrong
    if (request.top or request.others is not None) and (wrong := _wrong_ids(request, count, capabilities)):
        return wrong
    kept_ids = request.kept.ids.tolist() if request.kept is not None else []
    other_ids = request.others.ids.tolist() if request.others is not None else []
    return _outside([request.token_ids.min(), request.token_ids.max(), *kept_ids, *other_ids], vocab_size)


def _wrong_kept(request: ScoreRequest, kept: KeptSets) -> str | None:
    try:
        IdLists(offsets=kept.offsets, ids=kept.ids).check(len(request.positions))
    except RecordError:
        return "kept sets must be of the scored positions, one each, their ids ascending"
    for index, position in enumerate(request.positions.tolist()):
        own = kept.of(index)
        if own is not None and request.token_ids[position] not in own:
            return f"the token at position {position} is not in its kept set, so it has no log-probability there"
    return None


def _wrong_ids(request: ScoreRequest, count: int, capabilities: Capabilities) -> str | None:
    if not capabilities.ids_scored:
        return "it does not have the capability `ids_scored`; choose an engine that declares it"
    if request.top < 0:
        return f"{request.top} likeliest ids cannot be found"
    if request.others is None:
        return None
    try:
        request.others.check(count)
    except RecordError as error:
        return str(error)
    if request.kept is None:
        return None
    for index in range(count):
        kept, own = request.kept.of(index), request.others.at(index)
        if kept is not None and not np.all(np.isin(own, kept)):
            return f"ids to score at position {request.positions[index]} are not in its kept set"
    return None


def _wrong_bias(bias: TokenBias, count: int, capabilities: Capabilities, vocab_size: int) -> str | None:
    if not capabilities.logit_bias:
        return "it does not have the capability `logit_bias`; choose an engine that declares it"
    try:
        bias.check(count)
    except RecordError as error:
        return str(error)
    return _outside([bound for each in bias.biases for bound in (each.ids[0], each.ids[-1])], vocab_size)


def _outside(ids: list[int], vocab_size: int) -> str | None:
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"ids {min(ids)}..{max(ids)} are outside its vocabulary of {vocab_size}"
    return None
