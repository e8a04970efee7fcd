"""Whole runs of fine-tuning and of preference training: books, resume bit for bit, the model they leave, refusals."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from fathom.apps.cli.main import app
from fathom.core.errors import CheckpointError, ConfigError, DataError, FathomError
from fathom.envs.arithmetic import Arithmetic, ArithmeticOptions
from fathom.envs.written_rows import write_rows
from fathom.evidence.tuning.summary import audit_tuning, is_tuning, summarise_tuning
from fathom.ledger.reader import LedgerReader
from fathom.model.language_model import LanguageModel
from fathom.run.tuning.plan import parse_tuning
from fathom.run.tuning.run import TuningRun, kind_of
from fathom.sync.digest import digest
from fathom.trainer.tuning.order import SampleOrder

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    environment = Arithmetic(ArithmeticOptions(num_train=40, num_eval=8, max_operand=9, operators=("+",)))
    write_rows(environment, folder / "sft", pairs=False, seed=0)
    write_rows(environment, folder / "dpo", pairs=True, seed=0)
    return folder


def config(files, runs, kind, *, steps=None, trainer=None, **changes):
    tree = {
        "kind": kind,
        "name": "small",
        "runs_dir": str(runs),
        "model": {"tiny": "arithmetic"},
        "data": {"train": [str(files / kind / "train.jsonl")], "held_out": str(files / kind / "eval.jsonl")},
        "trainer": {"tokens_per_step": 150, "tokens_per_micro_batch": 64, "optimizer": {"lr": 3e-3}} | (trainer or {}),
        "checkpoint": {"every_steps": 5},
    }
    tree["trainer"] |= {"epochs": 2} if steps is None else {"steps": steps}
    return parse_tuning(tree | changes, "test", kind)


def told(folder):
    with LedgerReader(folder / "ledger") as reader:
        assert is_tuning(reader)
        report = audit_tuning(reader)
        assert report.passed, report
        return summarise_tuning(reader)


def test_fine_tuning_trains_each_sample_once_an_epoch_and_leaves_a_model(data, tmp_path):
    result = TuningRun.of(config(data, tmp_path, "sft")).start()
    assert (result.reason, result.exit_code, kind_of(result.folder)) == ("steps", 0, "sft")
    summary = told(result.folder)
    assert [(epoch.trained, epoch.of) for epoch in summary.epochs] == [(40, 40)] * 2
    assert summary.books.examined == 80
    first, last = summary.supervised_evaluations
    assert last.loss < first.loss
    assert len(first.per_sample) == 8
    assert {name for name, _ in summary.differences} == {"loss of a token", "probability of an answer"}
    model = LanguageModel.load(result.folder / "trained", torch.float32, "cpu")
    assert summary.model is not None
    assert digest(model.weights()) == summary.model.weights_digest == summary.supervised[-1].weights_digest
    assert (result.folder / "trained" / "tokenizer.json").is_file()
    shown = CliRunner().invoke(app, ["show", str(result.folder)])
    assert shown.exit_code == 0, shown.output
    assert "books, balanced" in shown.output
    assert "supervised fine-tuning: ended: steps" in shown.output
    told_json = json.loads(CliRunner().invoke(app, ["show", str(result.folder), "--json"]).output)
    assert told_json["prepared"]["samples"] == 40
    assert CliRunner().invoke(app, ["audit", str(result.folder)]).exit_code == 0


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_resumed_run_goes_on_bit_for_bit(data, tmp_path, kind):
    straight = told(TuningRun.of(config(data, tmp_path / "a", kind, steps=3)).start().folder)
    half = TuningRun.of(config(data, tmp_path / "b", kind, steps=2)).start().folder
    tree = json.loads((half / "config.json").read_text())
    tree["trainer"]["steps"] = 3
    (half / "config.json").write_text(json.dumps(tree))
    assert TuningRun.resume(half).start().reason == "steps"
    resumed = told(half)
    steps = [(run.supervised or run.preference) for run in (straight, resumed)]
    digests = [[(step.number, step.samples, step.weights_digest) for step in run] for run in steps]
    assert digests[0] == digests[1]
    assert resumed.incarnations == 2
    assert TuningRun.resume(half).start().reason == "steps", "one that has ended ends at once"
    assert told(half).incarnations == 2


def test_preferences_are_learned_against_a_frozen_start(data, tmp_path):
    warm = {"tasks": 40, "steps": 20, "batch_size": 20, "optimizer": {"lr": 3e-3}}
    made = config(data, tmp_path, "dpo", steps=12, warm_start=warm, objective={"beta": 0.3})
    summary = told(TuningRun.of(made).start().folder)
    assert summary.warm_start is not None
    assert summary.reference is not None
    first, last = summary.preference_evaluations
    assert max(map(abs, first.margins)) < 1e-4, "the reference is the policy that the first step starts from"
    assert summary.preference[-1].accuracy > 0.6
    assert summary.preference[-1].loss < summary.preference[0].loss == pytest.approx(0.6931, abs=1e-3)
    assert last.step == 12
    assert {name for name, _ in summary.differences} == {"chosen is likelier", "probability of chosen"}


def test_other_data_or_another_seed_cannot_go_on(data, tmp_path):
    folder = TuningRun.of(config(data, tmp_path, "sft", steps=2)).start().folder
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | {"seed": 1}))
    with pytest.raises(CheckpointError, match="the samples, or what decides their order"):
        TuningRun.resume(folder).start()


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_other_held_out_samples_cannot_go_on(data, tmp_path, kind):
    """As many as before: only what they are tells."""
    rows = (data / kind / "eval.jsonl").read_text().splitlines()
    own = tmp_path / "held.jsonl"
    own.write_text("\n".join(rows[:4]))
    files = {"train": [str(data / kind / "train.jsonl")], "held_out": str(own)}
    folder = TuningRun.of(config(data, tmp_path, kind, steps=2, data=files)).start().folder
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | {"trainer": tree["trainer"] | {"steps": 3}}))
    own.write_text("\n".join(rows[4:8]))
    with pytest.raises(CheckpointError, match="the held-out samples are not those"):
        TuningRun.resume(folder).start()
    own.write_text("\n".join(rows[:4]))
    assert TuningRun.resume(folder).start().reason == "steps"


def test_other_scores_of_the_reference_cannot_go_on(data, tmp_path):
    folder = TuningRun.of(config(data, tmp_path, "dpo", steps=2)).start().folder
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | {"trainer": tree["trainer"] | {"steps": 3}}))
    kept = folder / "reference.safetensors"
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is not what the reference scored when the run began"):
        TuningRun.resume(folder).start()
    kept.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        TuningRun.resume(folder).start()
    kept.write_bytes(whole)
    assert TuningRun.resume(folder).start().reason == "steps"


def test_too_long_samples_are_refused_left_out_or_cut(data, tmp_path):
    limited = {"train": [str(data / "sft" / "train.jsonl")], "max_tokens": 7}
    with pytest.raises(DataError, match=r"row 1 has a sequence of \d tokens, and 7 are possible"):
        TuningRun.of(config(data, tmp_path, "sft", data=limited | {"too_long": "refuse"}))
    left = TuningRun.of(config(data, tmp_path, "sft", data=limited | {"too_long": "leave_out"})).plan.prepared
    assert left.counted.left_out > 0
    assert len(left.train) + left.counted.left_out == 40
    cut = TuningRun.of(config(data, tmp_path, "sft", data=limited | {"too_long": "truncate"})).plan.prepared
    assert cut.counted.truncated == left.counted.left_out
    assert len(cut.train) == 40
    assert max(len(row.token_ids) for row in cut.rows) == 7
    with pytest.raises(ConfigError, match="would compare answers by where they were cut"):
        config(data, tmp_path, "dpo", data={"train": ["x"], "too_long": "truncate"})
    with pytest.raises(ConfigError, match="exceeds the 256 positions"):
        TuningRun.of(config(data, tmp_path, "sft", data=limited | {"max_tokens": 300}))


def test_what_is_held_out_is_not_trained(data, tmp_path):
    file = data / "sft" / "train.jsonl"
    share = TuningRun.of(config(data, tmp_path, "sft", data={"train": [str(file)], "held_out_share": 0.25})).plan
    assert (len(share.prepared.train), len(share.prepared.held_out)) == (30, 10)
    every = TuningRun.of(config(data, tmp_path, "sft", data={"train": [str(file)]})).plan.prepared
    for epoch in range(3):
        order = SampleOrder([1] * 40, tokens_per_step=1, seed=0, shuffle=True).epoch(epoch)
        first = {every.train[place].rows[0].token_ids.tobytes() for (place,) in order[:10]}
        assert first != {sample.rows[0].token_ids.tobytes() for sample in share.prepared.held_out}, "drawn apart"
    both = TuningRun.of(config(data, tmp_path, "sft", data={"train": [str(file)] * 2, "held_out_share": 0.25})).plan
    assert both.prepared.counted.also_held_out > 0
    trained = {row.token_ids.tobytes() for row in both.prepared.rows}
    assert not trained & {row.token_ids.tobytes() for sample in both.prepared.held_out for row in sample.rows}
    with pytest.raises(ConfigError, match="no sample is left to train on: 0 are too long, 40 are held out"):
        TuningRun.of(config(data, tmp_path, "sft", data={"train": [str(file)], "held_out": str(file)}))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"prompt": "1", "chosen": "2", "rejected": "2"}], "chosen and rejected are equal"),
        ([{"prompt": "1", "chosen": "2", "rejected": ""}], "rejected is empty"),
        ([{"prompt": "1", "chosen": "2", "rejected": "Ü"}], "cannot encode"),
    ],
)
def test_a_bad_pair_stops_the_run_before_anything_starts(data, tmp_path, rows, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=reason):
        TuningRun.of(config(data, tmp_path, "dpo", data={"train": [str(path)]}))
    assert not list(tmp_path.glob("small-*"))


def test_commands_start_resume_and_refuse(data, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        f'name = "cli"\nruns_dir = "{tmp_path}"\n[model]\ntiny = "arithmetic"\n[trainer]\nsteps = 2\n'
        f'[data]\ntrain = ["{data / "sft" / "train.jsonl"}"]\n'
    )
    dry = CliRunner().invoke(app, ["sft", str(file), "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "train on 40 conversations" in dry.output
    assert CliRunner().invoke(app, ["sft", str(file)]).exit_code == 0
    again = CliRunner().invoke(app, ["resume", "cli", "--runs-dir", str(tmp_path)])
    assert again.exit_code == 0, again.output
    worst = CliRunner().invoke(app, ["trace", "cli", "--runs-dir", str(tmp_path), "--worst", "1", "--limit", "2"])
    assert "places of its samples among those trained on" in worst.output
    with pytest.raises(ConfigError, match="has no trajectories, engines or chain of versions"):
        CliRunner().invoke(app, ["trace", "cli", "--runs-dir", str(tmp_path)], catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"unknown option trainer\.stps; did you mean trainer.steps"):
        CliRunner().invoke(app, ["sft", str(file), "trainer.stps=3"], catch_exceptions=False)
    file.write_text('kind = "dpo"\nname = "x"\n')
    with pytest.raises(ConfigError, match="start it with fathom dpo"):
        CliRunner().invoke(app, ["sft", str(file)], catch_exceptions=False)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_an_adapter_is_trained_alone(data, tmp_path, kind):
    folder = TuningRun.of(config(data, tmp_path, kind, steps=2, lora={"rank": 2})).start().folder
    summary = told(folder)
    assert json.loads((folder / "trained" / "adapter_config.json").read_text())["r"] == 2
    assert (folder / "trained" / "adapter_model.safetensors").is_file()
    steps = summary.supervised or summary.preference
    assert steps[0].weights_digest != steps[1].weights_digest


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_weights_that_diverge_end_the_run(data, tmp_path, kind):
    trainer = {"optimizer": {"lr": 1e30}}
    with pytest.raises(FathomError, match=r"of step \d+ is (finite: the weights have diverged|not finite)"):
        TuningRun.of(config(data, tmp_path, kind, steps=4, trainer=trainer)).start()
