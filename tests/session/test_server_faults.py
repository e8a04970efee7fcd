"""What goes wrong between an agent and its session: lost replies, engines that fail, keys and bodies that are wrong."""

import threading

import anthropic
import httpx
import openai
import pytest
from plain_parts import text
from served import serving

from fathom.core.errors import EngineError, EngineRefusedError
from fathom.core.records.trajectory import TrajectoryStatus

ASK = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def openai_client(served, key, **options):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, **({"max_retries": 0} | options))


def post(served, path, key="", body=None, **options):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{served.url}{path}", json=ASK if body is None else body, headers=headers, **options)


def test_a_client_that_gives_up_and_retries_gets_the_one_answer():
    """The engine ends its answer only when the call has been sent a second time."""
    sent = []

    def send(request):
        sent.append(request)
        if len(sent) == 2:
            served.call(served.answers.gate.set)

    line = httpx.Client(event_hooks={"request": [send]})
    with (
        serving("hi$", gated=True) as served,
        openai_client(served, key := served.open(), timeout=2, max_retries=3, http_client=line) as client,
    ):
        assert client.chat.completions.create(**ASK).choices[0].message.content == "hi"
        (branch,) = served.close(key).payload.branches
        assert len(served.answers.requests) == len(branch.turns) == 1


def test_a_stream_that_was_left_is_heard_again_from_its_beginning():
    with serving("hello$", gated=True) as served, openai_client(served, served.open()) as client:
        stream = client.chat.completions.create(**ASK, stream=True)
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        stream.close()
        served.call(served.answers.gate.set)
        resent = {"x-stainless-retry-count": "1"}
        chunks = list(client.chat.completions.create(**ASK, stream=True, extra_headers=resent))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
        assert len(served.answers.requests) == 1


def test_a_reply_that_was_lost_on_its_way_is_given_again_to_who_says_so():
    with serving("hi$", "yo$") as served:
        key = served.open()
        headers = {"authorization": f"Bearer {key}"}
        url = f"{served.url}/v1/chat/completions"
        first = httpx.post(url, json=ASK, headers=headers).json()
        resent = httpx.post(url, json=ASK, headers=headers | {"x-stainless-retry-count": "1"}).json()
        anew = httpx.post(url, json=ASK, headers=headers | {"x-stainless-retry-count": "0"}).json()
        said = [each["choices"][0]["message"]["content"] for each in (first, resent, anew)]
        assert said == ["hi", "hi", "yo"]


def test_an_idempotency_key_is_of_one_call():
    with serving("hi$") as served:
        key = served.open()
        headers = {"authorization": f"Bearer {key}", "idempotency-key": "one"}
        url = f"{served.url}/v1/chat/completions"
        assert [httpx.post(url, json=ASK, headers=headers).status_code for _ in range(2)] == [200, 200]
        other = ASK | {"messages": [{"role": "user", "content": "y"}]}
        refused = httpx.post(url, json=other, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_conflict")
        assert len(served.answers.requests) == 1


def test_calls_at_once_in_one_session_are_branches_of_it():
    with serving(*[f"a{n}$" for n in range(8)]) as served, openai_client(served, key := served.open()) as client:
        said = {}

        def ask(number):
            messages = [{"role": "user", "content": f"q{number}"}]
            said[number] = client.chat.completions.create(model="m", messages=messages).choices[0].message.content

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        branches = [text(branch.token_ids) for branch in served.close(key).payload.branches]
        assert sorted(branches) == sorted(f"u:q{number}$a:{said[number]}$" for number in range(8))


def test_a_failed_engine_is_asked_again_by_the_client_itself():
    with serving("hi$", "hi$", failure=EngineError("e", "gone")) as served:
        key = served.open()
        with openai_client(served, key, max_retries=1) as client:
            assert client.chat.completions.create(**ASK).choices[0].message.content == "hi"
        assert served.close(key).status is TrajectoryStatus.COMPLETED
        assert len(served.answers.requests) == 2


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(EngineError("e", "gone"), "InternalServerError"), (EngineRefusedError("e", "no"), "BadRequestError")],
)
def test_failures_have_the_errors_of_each_client(failure, kind):
    with serving("h$", failure=failure) as served:
        client = openai_client(served, served.open())
        with client, pytest.raises(getattr(openai, kind), match=failure.reason):
            client.chat.completions.create(**ASK)
    with serving("h$", failure=failure) as served:
        client = anthropic.Anthropic(base_url=served.url, api_key=served.open(), max_retries=0)
        with client, pytest.raises(getattr(anthropic, kind), match=failure.reason):
            client.messages.create(max_tokens=9, **ASK)


def test_a_stream_that_breaks_off_says_so():
    engine = {"gated": True, "failure": EngineError("e", "gone")}
    with serving("hello$", **engine) as served, openai_client(served, served.open()) as client:
        chunks = iter(client.chat.completions.create(**ASK, stream=True))
        next(chunks)
        served.call(served.answers.gate.set)
        with pytest.raises(openai.APIError, match="gone"):
            list(chunks)


def test_keys_are_refused_in_words():
    with serving() as served:
        key = served.open()
        assert post(served, f"/s/{key}/v1/chat/completions", body=[]).status_code == 400
        served.close(key)
        with openai_client(served, key, max_retries=5) as client:
            with pytest.raises(openai.APIStatusError, match="has ended") as ended:
                client.chat.completions.create(**ASK)
            assert (ended.value.status_code, ended.value.code) == (410, "session_ended")
        client = anthropic.Anthropic(base_url=served.url, api_key="guess")
        with client, pytest.raises(anthropic.AuthenticationError, match="names no session"):
            client.messages.create(max_tokens=9, **ASK)
        assert post(served, "/v1/responses").status_code == 401
        assert httpx.get(f"{served.url}/v1/models").status_code == 401


def test_the_key_may_stand_in_the_path_and_models_are_listed():
    with serving("hi$") as served:
        key = served.open()
        assert post(served, f"/s/{key}/v1/chat/completions").json()["choices"][0]["message"]["content"] == "hi"
        with openai_client(served, key) as client:
            assert [model.id for model in client.models.list()] == ["m"]
        with anthropic.Anthropic(base_url=served.url, api_key=key) as client:
            assert [model.id for model in client.models.list()] == ["m"]
        missing = post(served, "/v1/embeddings", key)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


def test_no_body_is_unbounded():
    with serving(max_body_bytes=1000) as served:
        body = ASK | {"user": "x" * 2000}
        refused = post(served, "/v1/messages", served.open(), body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (413, "request_too_large")


def test_a_full_context_has_the_words_that_agents_look_for():
    with serving() as served:
        key = served.open(max_context_tokens=3)
        with openai_client(served, key) as client, pytest.raises(openai.BadRequestError) as full:
            client.chat.completions.create(**ASK)
        assert full.value.code == "context_length_exceeded"
        assert "maximum context length" in str(full.value)
        client = anthropic.Anthropic(base_url=served.url, api_key=key)
        with client, pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(max_tokens=9, **ASK)
        assert served.close(key).cause == "context"


def test_ends_are_told_apart():
    with serving("hello$", "say END", '~bash~{"a": 1') as served:
        key = served.open()
        with openai_client(served, key) as client:
            cut = client.chat.completions.create(**ASK, max_completion_tokens=3)
            assert (cut.choices[0].finish_reason, cut.choices[0].message.content) == ("length", "hel")
        with anthropic.Anthropic(base_url=served.url, api_key=key) as client:
            stopped = client.messages.create(max_tokens=50, stop_sequences=["END"], **ASK)
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
            assert served.answers.requests[-1].stop_strings == ("END",)
            within = client.messages.create(max_tokens=12, **ASK)
            assert within.stop_reason == "max_tokens"
            assert within.content[0].input == {"malformed_arguments": '{"a": '}
