"""What overlapping rollout and training gives when answers take their time, and what it costs when they do not.

    plain       generate, grade, train, publish; no buffer, no ledger       every variant trains the same occurrences,
    S=0         the run's own loop at staleness bound 0                     each exactly once (`drop` loses some), with
    S=2 wait    asynchronous; no step over-ages a group in flight           one engine and one trainer thread, and the
    S=2 drop    asynchronous; over-aged groups are dropped                  same sleep behind the same answer

The learning rate is so small that all variants sample the same answers: what differs is the schedule alone.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median as middle
from typing import final

from fathom.bench.options import PipelineOptions
from fathom.bench.record import Measured, Sample, Say, Target, alternating, median, ratios
from fathom.bench.rig.plain_loop import plain_loop
from fathom.bench.rig.slow_environment import SlowEnvironment
from fathom.bench.rig.stand import PROMPT_TOKENS, open_stand, tiny_model
from fathom.config.load import parse_config
from fathom.config.run import RunConfig
from fathom.core.errors import BooksError, NoProgressError
from fathom.core.ids import Occurrence, group_id, trajectory_id
from fathom.core.records.states import OccurrenceState
from fathom.envs.arithmetic import Arithmetic, ArithmeticOptions
from fathom.envs.grading.grader import Grader
from fathom.evidence.report.run_summary import RunSummary
from fathom.evidence.report.summary import summarise
from fathom.evidence.runs import ledger_of
from fathom.ledger.events import GroupStarted, StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.rollout.episode import EpisodePlan
from fathom.run.resolve import Resolved, resolve
from fathom.run.rollouts.dispatch import Dispatch
from fathom.run.run import Run

PLAIN, SYNC, WAIT, DROP = "plain", "S=0", "S=2 wait", "S=2 drop"
SYNC_NOW, WAIT_NOW = "S=0, no latency", "S=2 wait, no latency"
STALENESS: dict[str, dict[str, int | str]] = {
    SYNC: {"max_staleness": 0},
    WAIT: {"max_staleness": 2, "on_stale": "wait"},
    DROP: {"max_staleness": 2, "on_stale": "drop"},
    SYNC_NOW: {"max_staleness": 0},
    WAIT_NOW: {"max_staleness": 2, "on_stale": "wait"},
}
"""The clock of every variant that is a run."""
PER_STEP = "full step"
"""Wall time per `groups` groups trained."""
_LR = 1e-12
_GRADE_S = 3600.0


def pipeline(options: PipelineOptions, say: Say) -> Measured:
    """Run every variant `repeats` times, in alternating order. Raises FathomError when one does not run to its end."""
    with tempfile.TemporaryDirectory(prefix="fathom-pipeline-") as name:
        scratch = Path(name)
        model = Path(options.model) if options.model else tiny_model(scratch / "model", options.seed)
        course = _Course(options=options, model=model, scratch=scratch)
        step_s = course.training_step_s()
        say(f"one training step takes {step_s * 1e3:.0f} ms: the median latency")
        samples = [Sample(variant="calibration", measure="training step", unit="s", repeat=0, value=step_s)]
        for repeat, variant in alternating((PLAIN, *STALENESS), options.repeats):
            median_s = 0.0 if variant in (SYNC_NOW, WAIT_NOW) else step_s
            taken = course.plain(repeat, median_s) if variant == PLAIN else course.run(variant, repeat, median_s)
            samples += taken
            say(f"repeat {repeat + 1} of {options.repeats}: {variant}: {taken[0].value:.2f} s a step")
    for above, below in ((SYNC, WAIT), (SYNC, DROP), (PLAIN, WAIT), (SYNC, PLAIN), (WAIT_NOW, SYNC_NOW)):
        samples += ratios(samples, PER_STEP, above, below)
    return Measured(samples=samples, targets=list(_targets(samples)), notes=_notes(options))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """The same occurrences for every variant."""

    options: PipelineOptions
    model: Path
    scratch: Path

    def training_step_s(self) -> float:
        """Median seconds of an optimizer step, measured in a synchronous run without latency."""
        with LedgerReader(self._start(SYNC_NOW, 0.0)) as reader:
            return middle(step.event.metrics.step_s for step in reader.events(StepTaken))

    def run(self, variant: str, repeat: int, median_s: float) -> list[Sample]:
        """One run. Its wall time is that of the loop: from the first group's start to the end of the last step."""
        with LedgerReader(self._start(variant, median_s)) as reader:
            started, steps, summary = reader.events(GroupStarted), reader.events(StepTaken), summarise(reader)
        occurrences = self.options.steps * self.options.groups
        trained = summary.books.occurrences[OccurrenceState.TRAINED]
        if not summary.books.balanced or not trained or (variant != DROP and trained != occurrences):
            raise BooksError(f"{variant}: {trained} of {occurrences} occurrences were trained; measure again")
        wall_s = steps[-1].at_s - started[0].at_s
        measures = {PER_STEP: wall_s * self.options.groups / trained, "wall": wall_s}
        return _samples(variant, repeat, measures | _busy(summary)) + _fates(variant, repeat, summary)

    def plain(self, repeat: int, median_s: float) -> list[Sample]:
        """The plain loop on the same plans; its wall time ends with the last step too."""
        wall_s = asyncio.run(self._plain(median_s))
        return _samples(PLAIN, repeat, {PER_STEP: wall_s / self.options.steps, "wall": wall_s})

    def _start(self, variant: str, median_s: float) -> Path:
        """Run to the end; returns the ledger. Raises NoProgressError when it ended early."""
        result = Run(self._config(variant), environment=self._environment(median_s)).start()
        if result.reason not in ("steps", "data"):
            raise NoProgressError(f"{variant} did not run to its end: {result.reason}; measure again")
        return ledger_of(result.folder)

    async def _plain(self, median_s: float) -> float:
        config, options = self._config(SYNC), self.options
        environment = self._environment(median_s)
        resolved = resolve(config, environment)
        grader = Grader(environment, workers=options.slots, timeout_s=_GRADE_S)
        stand = open_stand(
            self.model,
            self.scratch,
            config.trainer,
            max_context_tokens=PROMPT_TOKENS + options.max_new_tokens,
            max_running=options.slots,
        )
        async with grader, stand as parts:
            await parts.publish(0)
            runner = parts.runner(grader.grade, parts.tokenizer.special.stop_ids)
            times = await plain_loop(parts, runner, self._plans(resolved))
        return sum(step.total_s for step in times) - times[-1].publish_s

    def _plans(self, resolved: Resolved) -> Iterator[list[EpisodePlan]]:
        """Batch by batch, the plans that a run makes of the same occurrences."""
        dispatch = Dispatch(resolved.config, resolved.train)
        for step in range(self.options.steps):
            places = range(step * self.options.groups, (step + 1) * self.options.groups)
            units = dispatch.plans([(self._started(resolved, place), place) for place in places])
            yield [plan for unit in units for plan in unit]

    def _started(self, resolved: Resolved, place: int) -> GroupStarted:
        occurrence = Occurrence(epoch=0, index=place)
        group = group_id(occurrence, 0, 1)
        return GroupStarted(
            group=group,
            occurrence=occurrence,
            attempt=0,
            task=resolved.train[place].task.id,
            members=tuple(trajectory_id(group, member) for member in range(self.options.group_size)),
            version=0,
        )

    def _environment(self, median_s: float) -> SlowEnvironment:
        options = self.options
        sums = Arithmetic(ArithmeticOptions(num_train=options.steps * options.groups, num_eval=0, seed=options.seed))
        return SlowEnvironment(sums, median_s=median_s, sigma=options.sigma, seed=options.seed)

    def _config(self, variant: str) -> RunConfig:
        options = self.options
        tree = {
            "name": "bench",
            "runs_dir": str(self.scratch / "runs"),
            "seed": options.seed,
            "model": {"path": str(self.model), "chat_template": options.model is not None},
            "task": {
                "kind": "bench",
                "shuffle": False,
                "epochs": 1,
                "grader_workers": options.slots,
                "grade_timeout_s": _GRADE_S,
            },
            "rollout": {
                "group_size": options.group_size,
                "max_in_flight": options.slots,
                "max_new_tokens": options.max_new_tokens,
                "max_prompt_tokens": PROMPT_TOKENS,
            },
            "engine": {"max_running": options.slots},
            "staleness": STALENESS[variant],
            "trainer": {
                "steps": options.steps,
                "groups_per_step": options.groups,
                "optimizer": {"lr": _LR},
            },
            "checkpoint": {"every_steps": options.steps},
        }
        return parse_config(tree, "bench pipeline")


def _samples(variant: str, repeat: int, measures: dict[str, float]) -> list[Sample]:
    return [
        Sample(variant=variant, measure=measure, unit="s", repeat=repeat, value=value)
        for measure, value in measures.items()
    ]


def _busy(summary: RunSummary) -> dict[str, float]:
    """Seconds of the run that the trainer spent in steps, and waiting for batches."""
    return {
        "trainer in steps": sum(step.step_s for step in summary.steps),
        "trainer waiting": sum(step.waited_s for step in summary.steps),
    }


def _fates(variant: str, repeat: int, summary: RunSummary) -> list[Sample]:
    """Lengths and latencies of trajectories by how they ended: what is dropped is not like what is trained."""
    found: list[Sample] = []
    for fortune in summary.fortunes:
        for measure, unit, value in (
            ("trajectories", "", fortune.count),
            ("mean length", "tokens", fortune.tokens_mean),
            ("mean latency", "s", fortune.seconds_mean),
        ):
            name = f"{fortune.state}: {measure}"
            found.append(Sample(variant=variant, measure=name, unit=unit, repeat=repeat, value=float(value)))
    return found


def _targets(samples: list[Sample]) -> Iterator[Target]:
    """In words, with the medians over the repeats."""

    def target(claim: str, above: str, below: str, limit: float, at_most: bool) -> Target:
        measured = median(samples, f"{above} / {below}", f"{PER_STEP}, ratio")
        return Target(claim=claim, measured=measured, limit=limit, at_most=at_most, required=False)

    yield target("asynchronous (S=2, wait) over synchronous (S=0), times as fast", SYNC, WAIT, 2.0, at_most=False)
    yield target("S=0 over the plain loop, wall time", SYNC, PLAIN, 1.05, at_most=True)
    yield target("no latency: asynchronous over synchronous, wall time", WAIT_NOW, SYNC_NOW, 1.05, at_most=True)


def _notes(options: PipelineOptions) -> list[str]:
    return [
        f"a full step is {options.groups} groups of {options.group_size}; where groups were dropped, the wall time is "
        "shared among those that were trained",
        "wall time is from the first group's start to the end of the last step; starting processes is not in it",
    ]
