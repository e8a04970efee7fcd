"""A model that judges: its number, or a cause; never a reward of 0 for a fault, and never more than the budget."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import ValidationError

from fathom.core.errors import ConfigError, UngradedError
from fathom.core.records.trajectory import Graded, Ungraded
from fathom.envs.grading import Grader
from fathom.envs.judging import Judge, JudgeOptions
from fathom.envs.judging.budget import Budget
from fathom.envs.judging.scripted_judge import JudgeCall, JudgeReply, ScriptedJudge
from fathom.envs.registry import build_environment
from fathom.envs.rows import Rows, RowsOptions

FAST = {"model": "judge-1", "timeout_s": 5.0, "backoff_s": 0.01, "deadline_s": 10.0}


def judge_at(server: ScriptedJudge, **options) -> Judge:
    return Judge(JudgeOptions(base_url=server.base_url, **{**FAST, **options}))


def cause_of(judge: Judge) -> tuple[str, str]:
    with pytest.raises(UngradedError) as caught:
        judge.score_now("how good?")
    return caught.value.cause, caught.value.detail


def test_a_judge_is_asked_as_the_official_clients_ask() -> None:
    with ScriptedJudge(JudgeReply(text=" 0.25\n")) as server:
        judge = judge_at(server, max_answer_tokens=9)
        assert judge.score_now("how good?") == 0.25
    (call,) = server.calls
    assert call.path == "/v1/chat/completions"
    assert call.authorization == ""
    assert call.body == {
        "model": "judge-1",
        "messages": [{"role": "user", "content": "how good?"}],
        "temperature": 0.0,
        "max_tokens": 9,
    }


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_tried_again(status: int) -> None:
    with ScriptedJudge(JudgeReply(status=status), JudgeReply(status=status), JudgeReply(text="1")) as server:
        judge = judge_at(server)
        assert judge.score_now("?") == 1.0
        assert judge.budget.used[0] == len(server.calls) == 3
    with ScriptedJudge(JudgeReply(status=status, text="busy")) as server:
        cause, detail = cause_of(judge_at(server, tries=2))
        assert (cause, len(server.calls)) == ("judge_unavailable", 2)
        assert f"answered {status}" in detail
        assert "busy" in detail


def test_a_late_answer_is_asked_for_again_until_the_deadline() -> None:
    with ScriptedJudge(JudgeReply(delay_s=60.0), JudgeReply(text="1")) as server:
        assert judge_at(server, timeout_s=2.0).score_now("?") == 1.0
    with ScriptedJudge(JudgeReply(delay_s=60.0)) as server:
        cause, detail = cause_of(judge_at(server, timeout_s=1.0, tries=2))
        assert (cause, len(server.calls)) == ("judge_timeout", 2)
        assert "no answer within 1 s (2 tries)" in detail
        cause, detail = cause_of(judge_at(server, timeout_s=0.5, deadline_s=0.2, tries=9))
        assert (cause, detail) == ("judge_timeout", "no judgement within 0.2 s")
    with ScriptedJudge(JudgeReply(status=503, headers={"retry-after": "3600"})) as server:
        cause, detail = cause_of(judge_at(server))
        assert (cause, len(server.calls)) == ("judge_timeout", 1)
        assert "before that: the judge answered 503" in detail


@pytest.mark.parametrize("status", [400, 401, 404, 301])
def test_a_refusal_is_not_repeated(status: int) -> None:
    with ScriptedJudge(JudgeReply(status=status, text="no")) as server:
        assert cause_of(judge_at(server))[0] == "judge_refused"
        assert len(server.calls) == 1


def test_a_judge_that_is_not_there_is_unreachable() -> None:
    with ScriptedJudge(JudgeReply()) as server:
        judge = judge_at(server)
    assert cause_of(judge)[0] == "judge_unreachable"


@pytest.mark.parametrize(
    "reply",
    [
        *(
            JudgeReply(text=text)
            for text in ["", "good", "0.5 points", "0.5\n0.5", "1/2", "nan", "inf", "1e0", "\u0661", "0,5"]
        ),
        *(JudgeReply(text=text) for text in ["1.01", "-0.1", "9" * 400]),
        JudgeReply(text="0.5", finish_reason="length"),
        JudgeReply(raw="<html>"),
        JudgeReply(raw='{"choices": []}'),
        JudgeReply(raw='{"choices": [{"message": {"content": null}}]}'),
        JudgeReply(raw='{"choices": [{"message": {"content": 1}}]}'),
    ],
)
def test_what_is_not_one_number_within_the_bounds_is_unreadable(reply: JudgeReply) -> None:
    with ScriptedJudge(reply) as server:
        assert cause_of(judge_at(server))[0] == "judge_unreadable"
        assert len(server.calls) == 1


def test_numbers_are_read_as_they_are_written() -> None:
    written = [form.format(n / 1000) for n in range(0, 10_000, 333) for form in ("{:.3f}", "{:+.4f}", "{:g}")]
    written += ["5", "5.", ".5", "007", "-0"]
    with ScriptedJudge(lambda call: JudgeReply(text=call.prompt)) as server:
        judge = judge_at(server, highest=10.0)
        assert asyncio.run(judge.scores(written)) == list(map(float, written))
    assert judge.scaled(5.0) == 0.5


def test_the_budget_of_calls_is_never_exceeded_and_that_of_tokens_ends_it() -> None:
    with ScriptedJudge(JudgeReply(total_tokens=40)) as server:
        judge = judge_at(server, max_calls=2)
        assert [judge.score_now("?"), judge.score_now("?")] == [1.0, 1.0]
        assert cause_of(judge) == ("judge_budget", "all 2 calls of the judge are used up; raise max_calls")
        assert len(server.calls) == 2
        judge = judge_at(server, max_tokens=50)
        assert [judge.score_now("?"), judge.score_now("?")] == [1.0, 1.0]
        assert judge.budget.used == (2, 80)
        assert cause_of(judge)[0] == "judge_budget"
    with ScriptedJudge(JudgeReply(total_tokens=None)) as server:
        judge = judge_at(server)
        judge.score_now("?" * 1000)
        assert judge.budget.used[1] > 1000, "what is not reported is charged by the byte"
    with ScriptedJudge(JudgeReply(delay_s=60.0)) as server:
        judge = judge_at(server, timeout_s=1.0, tries=2, max_tokens=1000)
        with pytest.raises(UngradedError, match="judge_budget"):
            judge.score_now("?" * 1000)
        assert (judge.budget.used[0], len(server.calls)) == (1, 1), "a call that is given up has been charged, too"


def test_the_budget_is_one_for_threads_and_starts_anew_elsewhere() -> None:
    budget = Budget(max_calls=200, max_tokens=None)

    def spend(_: int) -> bool:
        try:
            budget.take_call()
        except UngradedError:
            return False
        budget.add_tokens(3)
        return True

    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(spend, range(300)))
    assert sum(taken) == 200
    assert budget.used == (200, 600)
    assert pickle.loads(pickle.dumps(budget)).used == (0, 0)


def test_the_token_comes_from_a_variable_and_is_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "sk-secret")
    refusal = JudgeReply(status=401, text="wrong key sk-secret")
    with ScriptedJudge(JudgeReply(text="1"), refusal, JudgeReply(text="sk-secret")) as server:
        judge = judge_at(server, token_env="JUDGE_TOKEN")
        assert judge.score_now("?") == 1.0
        assert cause_of(judge) == ("judge_refused", 'the judge answered 401: {"error": {"message": "wrong key ***"}}')
        assert "sk-secret" not in cause_of(judge)[1]
        assert server.calls[0].authorization == "Bearer sk-secret"
        assert b"sk-secret" not in pickle.dumps(judge)
        assert "sk-secret" not in judge.options.model_dump_json()
        monkeypatch.delenv("JUDGE_TOKEN")
        with pytest.raises(ConfigError, match="JUDGE_TOKEN holds no token; export it"):
            judge_at(server, token_env="JUDGE_TOKEN")


@pytest.mark.parametrize(
    "options",
    [{"base_url": "http://me:pass@host/v1"}, {"base_url": "host/v1"}, {"lowest": 1.0}, {"surprise": 1}],
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        JudgeOptions(**{"base_url": "http://host/v1", "model": "m", **options})


def test_many_are_asked_side_by_side_and_one_fault_is_everybodys() -> None:
    def echo(call: JudgeCall) -> JudgeReply:
        return JudgeReply(text=call.prompt, delay_s=0.05)

    with ScriptedJudge(echo) as server:
        judge = judge_at(server, highest=9.0, concurrency=4)
        assert asyncio.run(judge.scores([str(n) for n in range(8)])) == [float(n) for n in range(8)]
        with pytest.raises(UngradedError, match="judge_unreadable"):
            asyncio.run(judge.scores(["1", "two", "3"]))


def rows(tmp_path, server: ScriptedJudge, **judge) -> Rows:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say {answer} well."}\n{"prompt": "And again."}\n')
    options = {"path": str(tmp_path / "rows.jsonl"), "grader": "judge"}
    made = build_environment("rows", {**options, "judge": {"base_url": server.base_url, **FAST, **judge}})
    assert isinstance(made, Rows)
    return made


def test_rows_are_judged_without_a_reference_in_graders_that_share_a_budget(tmp_path) -> None:
    async def grade(environment: Rows) -> list[Graded | Ungraded]:
        task = environment.tasks()[0]
        async with Grader(environment, workers=3, timeout_s=20.0) as grader:
            return await asyncio.gather(*(grader.grade(task, "very well") for _ in range(8)))

    with ScriptedJudge(JudgeReply(text="3", delay_s=0.05)) as server:
        rewards = asyncio.run(grade(rows(tmp_path, server, lowest=1, highest=5, max_calls=5)))
        asked = [call.prompt for call in server.calls]
    graded = [reward for reward in rewards if isinstance(reward, Graded)]
    assert len(graded) == len(asked) == 5
    assert {(reward.total, reward.grader, reward.answer_found) for reward in graded} == {(0.5, "judge/1 judge-1", True)}
    assert [reward.cause for reward in rewards if isinstance(reward, Ungraded)] == ["judge_budget"] * 3
    assert "Question:\nSay {answer} well." in asked[0]
    assert "very well" in asked[0]
    assert "from 1 (worthless) to 5" in asked[0]


def test_the_judge_and_its_section_go_together() -> None:
    with pytest.raises(ValidationError, match="go together"):
        RowsOptions(path="x.jsonl", grader="judge")
    with pytest.raises(ValidationError, match="go together"):
        RowsOptions(path="x.jsonl", judge=JudgeOptions(base_url="http://h/v1", model="m"))


def test_a_budget_of_nothing_asks_nothing() -> None:
    with ScriptedJudge(JudgeReply()) as server:
        assert cause_of(judge_at(server, max_calls=0))[0] == "judge_budget"
        assert not server.calls
