"""From files to samples, and all that can be known to be wrong before anything starts. Loads no model and no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from blake3 import blake3

from fathom.config.families import OptimizerKind, TooLong
from fathom.config.run import ModelConfig
from fathom.config.tuning.preference import PreferenceConfig
from fathom.config.tuning.sections import DataConfig, TuningModelConfig
from fathom.config.tuning.supervised import SupervisedConfig
from fathom.core.errors import ConfigError, DataError, MissingDependencyError
from fathom.core.records.demonstration import Demonstration
from fathom.core.records.message import Message, Role
from fathom.envs.conversations import ConversationRow, PairRow, read_conversations, read_pairs
from fathom.run.lora_checks import check_lora
from fathom.run.starting_model import StartingModel
from fathom.text.chat.demonstrations import ConversationRenderer, demonstrations
from fathom.text.chat.plain_renderer import PlainRenderer
from fathom.text.chat.renderer import TurnRenderer
from fathom.trainer.tuning.order import SampleOrder
from fathom.trainer.tuning.samples import Conversation, Pair, loss_tokens

S = TypeVar("S", Conversation, Pair)
R = TypeVar("R", ConversationRow, PairRow)
TuningConfig = SupervisedConfig | PreferenceConfig
_HELD_OUT_STREAM = (0, 1)
"""Keeps the draw of held-out rows apart from those of the epochs. A last word of 0 would not: numpy takes (seed, epoch)
and (seed, epoch, 0) for the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What became of the rows."""

    left_out: int
    """Samples left out as too long, held-out ones included."""
    truncated: int
    """Samples whose end was cut off, held-out ones included."""
    also_held_out: int
    """Training samples left out because they are held out too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Generic[S]):
    """A run that can start."""

    model: StartingModel
    """What it starts from."""
    train: tuple[S, ...]
    """Samples to train on, at least one."""
    held_out: tuple[S, ...]
    """Samples to evaluate on."""
    counted: Counted
    """What became of the rows."""
    order: SampleOrder
    """Which samples each step trains."""
    steps: int
    """Steps to take."""
    digest: str
    """BLAKE3 (hex) of the samples to train on and of what decides their order."""
    held_out_digest: str
    """BLAKE3 (hex) of the samples to evaluate on, in their order."""

    @property
    def rows(self) -> tuple[Demonstration, ...]:
        """All sequences to train on."""
        return tuple(row for sample in self.train for row in sample.rows)


def prepare_conversations(config: SupervisedConfig) -> Prepared[Conversation]:
    """Read and render what is imitated.

    Raises:
        ConfigError: the run cannot start; the message names the option, or the file and the row.
    """
    model, renderer = _text_of(config)

    def sample(row: ConversationRow) -> Conversation:
        return Conversation(rows=demonstrations(renderer, row.messages, row.tools, row.source, row.untrained))

    def cut(conversation: Conversation, limit: int) -> Conversation | None:
        rows = tuple(row for each in conversation.rows if (row := _truncated(each, limit)) is not None)
        return Conversation(rows=rows) if rows else None

    return _prepared(config, model, _Reading(read=read_conversations, sample=sample, cut=cut))


def prepare_pairs(config: PreferenceConfig) -> Prepared[Pair]:
    """Read and render what is compared. Raises ConfigError: as above, or the sides of a pair are the same tokens."""
    model, renderer = _text_of(config)

    def sample(row: PairRow) -> Pair:
        return _pair(renderer, row)

    prepared = _prepared(config, model, _Reading(read=read_pairs, sample=sample, cut=_uncut))
    warm_start = config.warm_start
    if warm_start is not None and warm_start.tasks > len(prepared.train):
        raise ConfigError(
            f"warm_start.tasks = {warm_start.tasks}, but there are only {len(prepared.train)} training pairs; lower it"
        )
    return prepared


# Rows -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading(Generic[R, S]):
    """How samples come of files."""

    read: Callable[[Path, int | None], Sequence[R]]
    sample: Callable[[R], S]
    cut: Callable[[S, int], S | None]


def _prepared(config: TuningConfig, model: StartingModel, reading: _Reading[R, S]) -> Prepared[S]:
    _check_options(config)
    data, limit = config.data, _longest(config.data, model)
    fitting = _Fitting(reading, data.too_long, limit)
    train = [sample for file in data.train for sample in fitting.samples(Path(file), data.max_rows)]
    if data.held_out is not None:
        held_out = list(fitting.samples(Path(data.held_out), data.max_rows))
    else:
        train, held_out = _split(train, data.held_out_share, config.seed)
    known = {_identity(sample) for sample in held_out}
    kept = tuple(sample for sample in train if _identity(sample) not in known)
    if not kept:
        raise ConfigError(
            f"no sample is left to train on: {fitting.left_out} are too long, {len(held_out)} are held out, and "
            f"{len(train) - len(kept)} of the others are the same as one of those; give other files, raise "
            "data.max_tokens, or hold out fewer"
        )
    trainer = config.trainer
    order = SampleOrder(
        [sample.tokens for sample in kept],
        tokens_per_step=trainer.tokens_per_step,
        seed=config.seed,
        shuffle=trainer.shuffle,
    )
    return Prepared(
        model=model,
        train=kept,
        held_out=tuple(held_out),
        counted=Counted(left_out=fitting.left_out, truncated=fitting.truncated, also_held_out=len(train) - len(kept)),
        order=order,
        steps=trainer.steps if trainer.steps is not None else order.steps_in(trainer.epochs or 0),
        digest=_digest(kept, (config.seed, trainer.tokens_per_step, trainer.shuffle)),
        held_out_digest=_digest(held_out, ()),
    )


class _Fitting(Generic[R, S]):
    """Samples of files, those that are too long treated as asked."""

    def __init__(self, reading: _Reading[R, S], too_long: TooLong, limit: int) -> None:
        self._reading = reading
        self._too_long = too_long
        self._limit = limit
        self.left_out = 0
        self.truncated = 0

    def samples(self, path: Path, max_rows: int | None) -> list[S]:
        """Those of a file, in its order."""
        found: list[S] = []
        for row in self._reading.read(path, max_rows):
            try:
                sample = self._reading.sample(row)
            except DataError as error:
                raise DataError(f"{row.source}: {error}") from error
            fitted = sample if sample.longest <= self._limit else self._fitted(sample, row.source)
            if fitted is not None:
                found.append(fitted)
        return found

    def _fitted(self, sample: S, source: str) -> S | None:
        cut = None
        match self._too_long:
            case TooLong.REFUSE:
                raise DataError(
                    f"{source} has a sequence of {sample.longest} tokens, and {self._limit} are possible "
                    "(data.max_tokens, and what the model was made for); raise it, or set data.too_long = 'leave_out'"
                )
            case TooLong.LEAVE_OUT:
                pass
            case TooLong.TRUNCATE:
                cut = self._reading.cut(sample, self._limit)
        self.left_out += cut is None
        self.truncated += cut is not None
        return cut


def _truncated(row: Demonstration, limit: int) -> Demonstration | None:
    """None: nothing to imitate is left."""
    token_ids, loss_mask = row.token_ids[:limit], row.loss_mask[:limit]
    return Demonstration(token_ids=token_ids, loss_mask=loss_mask, source=row.source) if loss_mask.any() else None


def _uncut(pair: Pair, limit: int) -> Pair | None:
    """Pairs are never cut: `PreferenceConfig` refuses it."""
    return None


def _pair(renderer: ConversationRenderer, row: PairRow) -> Pair:
    context = frozenset(place for place, said in enumerate(row.prompt) if said.role is Role.ASSISTANT)

    def side(answer: tuple[Message, ...]) -> tuple[Demonstration, ...]:
        return demonstrations(renderer, (*row.prompt, *answer), row.tools, row.source, context)

    pair = Pair(chosen=side(row.chosen), rejected=side(row.rejected))
    if _row_ids(pair.chosen) == _row_ids(pair.rejected):
        raise DataError("chosen and rejected are the same tokens; there is nothing to prefer")
    return pair


def _split(samples: list[S], share: float, seed: int) -> tuple[list[S], list[S]]:
    """(train, held out): a share, at least one if any, drawn by the seed; both in the files' order."""
    count = 0 if not share else max(1, round(share * len(samples)))
    drawn = set(np.random.default_rng([seed, *_HELD_OUT_STREAM]).permutation(len(samples))[:count].tolist())
    return (
        [sample for place, sample in enumerate(samples) if place not in drawn],
        [sample for place, sample in enumerate(samples) if place in drawn],
    )


def _digest(samples: Sequence[Conversation | Pair], order: tuple[int, ...]) -> str:
    found = blake3(repr(order).encode())
    for sample in samples:
        found.update(b"sample")
        for row in sample.rows:
            found.update(len(row.token_ids).to_bytes(8, "little") + row.token_ids.tobytes() + row.loss_mask.tobytes())
    return found.hexdigest()


def _identity(sample: Conversation | Pair) -> tuple[bytes, ...]:
    return _row_ids(sample.rows)


def _row_ids(rows: Sequence[Demonstration]) -> tuple[bytes, ...]:
    return tuple(row.token_ids.tobytes() for row in rows)


# Options --------------------------------------------------------------------------------------------------------------


def _text_of(config: TuningConfig) -> tuple[StartingModel, ConversationRenderer]:
    model = StartingModel.of(ModelConfig(path=config.model.path, tiny=config.model.tiny))
    check_lora(config.lora, config.name, model, None)
    return model, _renderer(config.model, model)


def _renderer(config: TuningModelConfig, model: StartingModel) -> ConversationRenderer:
    has_template = model.tokenizer.template is not None
    if config.chat_template and not has_template:
        raise ConfigError(
            "the model has no chat template; remove model.chat_template = true to join messages as plain text"
        )
    use_template = has_template if config.chat_template is None else config.chat_template
    return TurnRenderer(model.tokenizer) if use_template else PlainRenderer(model.tokenizer)


def _longest(data: DataConfig, model: StartingModel) -> int:
    if data.max_tokens is not None and data.max_tokens > model.max_positions:
        raise ConfigError(
            f"data.max_tokens = {data.max_tokens} exceeds the {model.max_positions} positions of the model; lower it"
        )
    return data.max_tokens or model.max_positions


def _check_options(config: TuningConfig) -> None:
    for tracker in config.trackers:
        if importlib.util.find_spec(tracker.value) is None:
            raise MissingDependencyError(f"trackers = ['{tracker}']", tracker.value, tracker.value)
    if config.trainer.optimizer.kind is OptimizerKind.ADAM8BIT and importlib.util.find_spec("bitsandbytes") is None:
        raise MissingDependencyError("trainer.optimizer.kind = 'adam8bit'", "bitsandbytes", "adam8bit")


def describe(config: TuningConfig, prepared: Prepared[Conversation] | Prepared[Pair]) -> list[str]:
    """What the run will do, in sentences."""
    kind = "conversations" if isinstance(config, SupervisedConfig) else "pairs"
    model = config.model.path or f"a tiny model made from seed {config.seed} ({config.model.tiny})"
    tokens, rows = sum(sample.tokens for sample in prepared.train), prepared.rows
    counted = prepared.counted
    asides = {
        "left out: too long": counted.left_out,
        "truncated": counted.truncated,
        "left out: held out too": counted.also_held_out,
    }
    aside = "".join(f", {count} {what}" for what, count in asides.items() if count)
    lines = [
        f"start from {model} in {config.trainer.dtype} on {config.trainer.device}"
        + (f", an adapter of rank {config.lora.rank}" if config.lora is not None else ""),
        f"train on {len(prepared.train)} {kind} in {len(rows)} sequences of {tokens} tokens, {loss_tokens(rows)} of "
        f"them with loss{aside}",
        f"take {prepared.steps} steps of at most {config.trainer.tokens_per_step} tokens; an epoch has "
        f"{prepared.order.steps_in(1)}",
        f"evaluate on {len(prepared.held_out)} held-out {kind}" if prepared.held_out else "evaluate on nothing",
    ]
    if isinstance(config, PreferenceConfig) and config.warm_start is not None:
        warm = config.warm_start
        lines.insert(2, f"warm start: imitate {warm.tasks} chosen answers for at most {warm.steps} steps")
    return lines
