"""The official client against a fleet of two tensor-parallel workers."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest

from tests.support.fleet.running_fleet import API_KEY, DEADLINE_S, ELASTIC, MODEL, RunningFleet

if TYPE_CHECKING:
    from openai import OpenAI

MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["Bern", "Chur"]}},
    "required": ["place"],
    "additionalProperties": False,
}
"""Parameters of the function `look`."""


@pytest.fixture
def client(fleet: RunningFleet) -> OpenAI:
    return fleet.client


def test_models_are_listed(client: OpenAI) -> None:
    models = list(client.models.list())
    assert sorted(model.id for model in models) == sorted((MODEL, ELASTIC))
    assert {(model.object, model.owned_by) for model in models} == {("model", "rayfleet")}


def test_chat_streamed_and_whole_say_the_same(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24
    )
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens > len(MESSAGES[0]["content"])


def test_completions_with_n_and_seed(client: OpenAI) -> None:
    def sample() -> list[str]:
        result = client.completions.create(
            model=MODEL, prompt="abc", n=2, seed=7, temperature=1.0, max_tokens=12
        )
        assert [choice.index for choice in result.choices] == [0, 1]
        return [choice.text for choice in result.choices]

    first = sample()
    assert first[0] != first[1]
    assert sample() == first


def test_logprobs_and_masks_come_through_every_process(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
        frequency_penalty=0.5,
        logit_bias={"40": 100},
        extra_body={"ignore_eos": True, "bad_words": ["zz"], "prompt_logprobs": 0},
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [3] * 6
    assert all(entry.logprob <= entry.top_logprobs[0].logprob for entry in logprobs.content)
    assert "".join(e.token for e in logprobs.content) == chat.choices[0].message.content
    assert chat.usage is not None
    assert len(chat.model_dump()["prompt_logprobs"]) == chat.usage.prompt_tokens
    echo = client.completions.create(model=MODEL, prompt="abc", echo=True, max_tokens=2, logprobs=1)
    columns = echo.choices[0].logprobs
    assert columns is not None
    assert columns.token_logprobs is not None
    assert columns.token_logprobs[0] is None
    assert all(value <= 0 for value in columns.token_logprobs[1:])
    assert echo.choices[0].text.startswith("abc")


def test_structured_outputs_conform(client: OpenAI) -> None:
    import openai

    schema = {
        "type": "object",
        "properties": {
            "sum": {"type": "integer", "minimum": 0, "maximum": 99},
            "sure": {"type": "boolean"},
        },
        "required": ["sum", "sure"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}

    def chat(stream: bool, temperature: float) -> str:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=temperature,
            response_format=form,
            stream=stream,
        )
        if not stream:
            assert answer.choices[0].finish_reason == "stop"
            return answer.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    for stream, temperature in ((False, 0.0), (True, 1.3)):
        jsonschema.validate(json.loads(chat(stream, temperature)), schema)
    choices = client.completions.create(
        model=MODEL,
        prompt="abc",
        n=3,
        temperature=1.3,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    ).choices
    assert {choice.text for choice in choices} <= {"yes", "no"}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="parenthesis"):
            client.completions.create(
                model=MODEL,
                prompt="abc",
                stream=stream,
                extra_body={"structured_outputs": {"regex": "(a"}},
            )


def test_responses_continue_from_stored_ones(client: OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "input": "What is 12 + 30?",
        "temperature": 0,
        "max_output_tokens": 120,
        "tools": [{"type": "function", "name": "look", "parameters": PLACE, "strict": True}],
        "tool_choice": {"type": "function", "name": "look"},
    }
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    calls = [response.output[0] for response in (whole, final)]
    assert [call.type for call in calls] == ["function_call"] * 2
    assert calls[0].arguments == calls[1].arguments
    jsonschema.validate(json.loads(calls[0].arguments), PLACE)
    assert client.responses.retrieve(whole.id).output == whole.output
    output = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"}
    second = client.responses.create(
        model=MODEL, previous_response_id=whole.id, input=[output], max_output_tokens=4
    )
    assert second.previous_response_id == whole.id
    assert whole.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > whole.usage.input_tokens - len(json.dumps(fields["tools"]))


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/chat/completions"])
def test_keys_guard_all_but_health(fleet: RunningFleet, path: str, headers: dict[str, str]) -> None:
    with httpx.Client(base_url=fleet.base_url, headers=headers) as http:
        answer = http.post(path, json={}) if "chat" in path else http.get(path)
        assert answer.status_code == 401
        assert "message" in answer.json()["error"]
        assert API_KEY not in answer.text
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_request_id_of_any_bytes_is_no_error_of_ours(fleet: RunningFleet, path: str) -> None:
    """Serve decodes some headers before calling a route, and so does its proxy."""
    headers = {
        b"X-Request-Id": b"\xff\xfe",
        b"serve_multiplexed_model_id": b"\x80",
        b"Authorization": f"Bearer {API_KEY}".encode(),
    }
    with httpx.Client(base_url=fleet.base_url, headers=headers, timeout=DEADLINE_S) as http:
        response = http.get(path)
    assert response.status_code == 200, response.text
    [request_id] = response.headers.get_list("x-request-id")
    assert request_id.isascii()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/"])
def test_a_packed_body_is_answered_under_one_request_id(fleet: RunningFleet, path: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    headers = {
        "authorization": f"Bearer {API_KEY}",
        "content-encoding": "gzip",
        "content-type": "application/json",
        "x-request-id": "mine-1",
    }
    with httpx.Client(base_url=fleet.base_url, headers=headers, timeout=DEADLINE_S) as http:
        response = http.post(path, content=gzip.compress(json.dumps(body).encode()))
    assert response.status_code == 200, response.text
    assert response.headers.get_list("x-request-id") == ["mine-1"]
    assert response.json()["id"] == "chatcmpl-mine-1"


def test_what_cannot_be_served_is_refused_with_the_numbers(client: OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model=MODEL, prompt="x" * 3000, max_tokens=4)
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model=MODEL, prompt="x", top_p=7)


def test_a_shared_prefix_goes_to_the_worker_that_has_it(client: OpenAI) -> None:
    prefix = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(1000))

    def complete(question: str) -> tuple[str, int]:
        answer = client.completions.with_raw_response.create(
            model=MODEL, prompt=prefix + question, max_tokens=2, temperature=0
        )
        usage = answer.parse().usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return answer.headers["x-rayfleet-worker"], usage.prompt_tokens_details.cached_tokens or 0

    worker, cached = complete("one")
    assert cached == 0
    again, cached = complete("two!")
    assert cached >= 960
    assert again == worker


def test_urgency_and_rules_of_admission_come_through_every_process(fleet: RunningFleet) -> None:
    with fleet.http as http:
        second = fleet.admission(MODEL, prefill_admission_policy="pack")
        assert len(second["workers"]) == 2
        for slo, met in (({"e2e_ms": 60_000}, True), ({"ttft_ms": 0.001}, False)):
            body = {"model": MODEL, "prompt": "abc", "max_tokens": 4, "priority": 9, "slo": slo}
            choice = http.post("/v1/completions", json=body).json()["choices"][0]
            assert choice["slo"]["met"] is met
        fleet.admission(MODEL, prefill_admission_policy="fifo")
        assert http.post("/admin/admission", json={}).status_code == 401, "a user's key"
