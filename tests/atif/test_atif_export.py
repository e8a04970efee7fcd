"""Trajectories of a ledger as ATIF files: what is read back trains exactly the tokens that the run trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from fathom.apps.cli.main import app
from fathom.core.errors import DataError
from fathom.core.records.sampling import FinishReason
from fathom.core.records.trajectory import TokenBranch, TokenPayload, Trajectory, Ungraded
from fathom.ledger.reader import LedgerReader
from fathom.text.atif.document import Document, read_file
from fathom.text.atif.rows import demonstrations_of
from fathom.text.chat_bytes import save_chat_bytes_tokenizer
from fathom.text.tokenizer import Tokenizer
from synthetic.history import History, config, write_run
from synthetic.records import ended, policy, trajectory

PROMPT = "<|user|>count the files<|end|><|assistant|>"
CALL = '<call>{"name": "bash", "arguments": {"command": "ls | wc -l"}}</call><|end|>'
RESULT = "<|tool|>3<|end|><|assistant|>"
ANSWER = "There are 3.<|end|>"
OTHER = "I do not know.<|end|>"


def branch(parts: list[str], tokenizer: Tokenizer, template: TokenBranch, *, parent: int | None = None) -> TokenBranch:
    """Texts, rendered and sampled in turn; a child shares the first two with its parent."""
    ids = [tokenizer.encode(part) for part in parts]
    ends = np.cumsum([len(part) for part in ids]).tolist()
    shared = ends[1] if parent is not None else 0
    sampled = np.repeat(np.arange(len(ids)) % 2 == 1, [len(part) for part in ids])
    loss = sampled.copy()
    loss[:shared] = False
    count = int(sampled.sum())
    rng = np.random.default_rng(len(ids))
    turns = [
        msgspec.structs.replace(
            template.turns[0], start=ends[at], end=ends[at + 1], cached_tokens=at, finish_reason=FinishReason.STOP
        )
        for at in range(0, len(ends), 2)
    ]
    return TokenBranch(
        parent=parent,
        shared_prefix=shared,
        token_ids=np.array([token_id for part in ids for token_id in part], np.int32),
        sampled=sampled,
        loss_mask=loss,
        logprobs=-rng.random(count, dtype=np.float32),
        policy_version=np.zeros(count, np.int32),
        kv_version=np.zeros(count, np.int32),
        turns=tuple(turns),
    )


def talk(tokenizer: Tokenizer) -> Trajectory:
    """Two branches: a tool is asked for and answered, and the agent went on in another way from the first turn."""
    record = trajectory()
    template = record.payload.branches[0]
    branches = (
        branch([PROMPT, CALL, RESULT, ANSWER], tokenizer, template),
        branch([PROMPT, CALL, RESULT.replace("3", "4"), OTHER], tokenizer, template, parent=0),
    )
    return msgspec.structs.replace(record, payload=TokenPayload(versions=(policy(0),), branches=branches))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "talks"
    folder.mkdir()
    (folder / "config.json").write_text(config().model_dump_json(exclude_unset=True))
    (folder / "tokenizer").mkdir()
    save_chat_bytes_tokenizer(folder / "tokenizer")
    history = History(folder / "ledger")
    history.open(config())
    record = talk(Tokenizer.load(folder / "tokenizer"))
    history.writer.append_trajectory(record, ended(record))
    lost = trajectory(member=1)
    header = msgspec.structs.replace(lost.header, reward=Ungraded(cause="grader_timeout", detail="late"))
    lost = msgspec.structs.replace(lost, header=header)
    history.writer.append_trajectory(lost, ended(lost))
    history.writer.close()
    return folder


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trajectories", *map(str, arguments)], env={"COLUMNS": "200"})


def exported(run: Path, out: Path, *arguments: object) -> dict[str, Document]:
    done = call("export", run, "--out", out, *arguments)
    assert done.exit_code == 0, done.output
    return {file.name: read_file(file) for file in sorted(out.iterdir())}


def branches_of(run: Path) -> Iterator[tuple[str, TokenBranch]]:
    with LedgerReader(run / "ledger") as reader:
        for entry in reader.trajectories():
            for place, each in enumerate(reader.trajectory(entry.id).trajectory.payload.branches):
                yield f"{entry.id.replace('/', '_')}.b{place}.json", each


def test_a_document_trains_what_the_run_trains(run: Path, tmp_path: Path) -> None:
    documents = exported(run, tmp_path / "out")
    branches = dict(branches_of(run))
    assert documents.keys() == branches.keys()
    for name, document in documents.items():
        (row,) = demonstrations_of(document, name)
        assert row.token_ids.tolist() == branches[name].token_ids.tolist()
        assert row.loss_mask.tolist() == branches[name].loss_mask.tolist()


def test_log_probabilities_and_caches_are_exact(run: Path, tmp_path: Path) -> None:
    documents = exported(run, tmp_path / "out")
    for name, each in branches_of(run):
        metrics = [step.metrics for step in documents[name].steps if step.metrics is not None]
        found = np.array([value for part in metrics for value in part.logprobs or ()], np.float32)
        assert np.array_equal(found, each.logprobs)
        assert [part.cached_tokens for part in metrics] == [turn.cached_tokens for turn in each.turns]
        assert documents[name].final_metrics is not None
        assert documents[name].final_metrics.total_prompt_tokens == sum(turn.start for turn in each.turns)


def test_turns_are_read_for_people(run: Path, tmp_path: Path) -> None:
    document = exported(run, tmp_path / "out")["1_e0.i0_a0_m0.b0.json"]
    user, asked, answered = document.steps
    assert (user.source, user.message) == ("user", PROMPT)
    assert asked.tool_calls is not None
    (asked_for,) = asked.tool_calls
    assert (asked_for.function_name, asked_for.arguments) == ("bash", {"command": "ls | wc -l"})
    assert asked.observation is not None
    (result,) = asked.observation.results
    assert (result.source_call_id, result.content) == (asked_for.tool_call_id, RESULT)
    assert (answered.message, answered.is_copied_context) == ("There are 3.", None)
    assert document.extra is not None
    assert (document.extra["reward"], document.extra["task"]) == (1.0, "task-0")


def test_what_has_its_loss_in_another_branch_is_copied_context(run: Path, tmp_path: Path) -> None:
    document = exported(run, tmp_path / "out")["1_e0.i0_a0_m0.b1.json"]
    assert [step.is_copied_context for step in document.steps if step.source == "agent"] == [True, None]


def test_what_has_no_reward_says_why_and_never_0(run: Path, tmp_path: Path) -> None:
    document = exported(run, tmp_path / "out")["1_e0.i0_a0_m1.b0.json"]
    assert document.extra is not None
    assert (document.extra["reward"], document.extra["ungraded"]) == (None, "grader_timeout")


def test_one_trajectory_or_one_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert list(exported(run, tmp_path / "one", "--trajectory", "1/e0.i1/a0/m1")) == ["1_e0.i1_a0_m1.b0.json"]
    names = [f"1_e0.i{place}_a0_m{member}.b0.json" for place in (2, 3) for member in (0, 1)]
    documents = exported(run, tmp_path / "step", "--step", "2")
    assert list(documents) == names
    assert documents[names[0]].steps[0].message == "", "the run has kept no tokenizer"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--step", 1, "--trajectory", "x"), "not both"),
        (("--step", 99), "there is no step 99"),
        (("--trajectory", "x"), "no trajectory 'x'"),
        (("--format", "csv"), "atif"),
    ],
)
def test_bad_wishes_are_refused_and_nothing_is_written(
    run: Path, tmp_path: Path, arguments: tuple[object, ...], words: str
) -> None:
    done = call("export", run, "--out", tmp_path / "out", *arguments)
    assert done.exit_code != 0
    assert words in done.output + str(done.exception)
    assert not list(tmp_path.glob("out/*"))


def test_a_folder_that_holds_something_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    assert "not an empty folder" in str(call("export", run, "--out", tmp_path).exception)


def test_check_says_what_makes_rows(run: Path, tmp_path: Path) -> None:
    exported(run, tmp_path / "out")
    files = sorted((tmp_path / "out").iterdir())
    done = call("check", *files)
    assert done.exit_code == 0
    tree = json.loads(files[0].read_text())
    tree["steps"][1]["metrics"]["completion_token_ids"][0] += 1
    files[0].write_text(json.dumps(tree))
    done = call("check", *files)
    assert done.exit_code == 1
    assert "it differs at token" in done.output
    assert "1 of 3 files make no rows" in str(done.exception)


def test_a_branch_that_is_not_trained_makes_no_row(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(config().model_dump_json(exclude_unset=True))
    history = History(run / "ledger")
    history.open(config())
    record = trajectory()
    first = record.payload.branches[0]
    untrained = msgspec.structs.replace(first, loss_mask=np.zeros_like(first.loss_mask))
    record = msgspec.structs.replace(record, payload=msgspec.structs.replace(record.payload, branches=(untrained,)))
    history.writer.append_trajectory(record, ended(record))
    history.writer.close()
    (document,) = exported(run, tmp_path / "out").values()
    with pytest.raises(DataError, match="no step of the agent is left"):
        demonstrations_of(document, "it")
