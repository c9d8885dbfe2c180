"""Cases with OpenAI's official client on /v1/responses."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import openai

from tests.campaigns.conformance.cases import TIMEOUT_S, Case, Endpoint, raised
from tests.campaigns.conformance.openai_client import FLAT_TOOL, Town, client_of

SETTINGS: Mapping[str, Any] = {"max_output_tokens": 24, "temperature": 0.8}
QUESTION = "What is 12 + 30?"
LONG = {"type": "array", "items": {"type": "integer"}, "minItems": 300}
"""Long enough that the response can be cancelled before it ends."""

SKIPPED = {
    "seed": "not in the API: events are compared with the final event of the stream",
    "built-in tools, MCP, code interpreter": "tools run at the client",
    "prompt (templates), conversation": "the server does not store them",
}


def create(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        answer: Any = client.responses.create(
            model=endpoint.model, input=QUESTION, instructions="Be brief.", **SETTINGS
        )
    assert answer.status in ("completed", "incomplete")
    assert answer.output[0].content[0].text == answer.output_text
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def stream(endpoint: Endpoint) -> None:
    """Checks that event numbers, item ids and the stored response are consistent."""
    with client_of(endpoint) as client:
        with client.responses.stream(model=endpoint.model, input=QUESTION, **SETTINGS) as events:
            received: list[Any] = list(events)
            final: Any = received[-1].response
        kept: Any = client.responses.retrieve(final.id)
    assert [event.sequence_number for event in received] == list(range(len(received)))
    assert (received[0].type, received[1].type) == ("response.created", "response.in_progress")
    assert received[-1].type in ("response.completed", "response.incomplete")
    text = "".join(e.delta for e in received if e.type == "response.output_text.delta")
    added = [e.item.id for e in received if e.type == "response.output_item.added"]
    done = [e.item.id for e in received if e.type == "response.output_item.done"]
    assert added == done == [item.id for item in final.output] == [item.id for item in kept.output]
    assert text == kept.output_text


def kept_and_forgotten(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        made: Any = client.responses.create(
            model=endpoint.model, input=QUESTION, metadata={"a": "b"}, **SETTINGS
        )
        kept: Any = client.responses.retrieve(made.id)
        assert kept.model_dump() == made.model_dump()
        client.responses.delete(made.id)
        raised(openai.NotFoundError, client.responses.retrieve, made.id)
        unkept: Any = client.responses.create(
            model=endpoint.model, input=QUESTION, store=False, **SETTINGS
        )
        raised(openai.NotFoundError, client.responses.retrieve, unkept.id)


def previous_response(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        fields: dict[str, Any] = {"model": endpoint.model, **SETTINGS}
        first: Any = client.responses.create(**fields, input=QUESTION)
        second: Any = client.responses.create(**fields, input="Why?", previous_response_id=first.id)
        both: Any = client.responses.create(
            **fields,
            input=[
                {"role": "user", "content": QUESTION},
                *[item.model_dump() for item in first.output],
                {"role": "user", "content": "Why?"},
            ],
        )
        raised(
            openai.NotFoundError,
            client.responses.create,
            **fields,
            input="Why?",
            previous_response_id="resp_unknown",
        )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens == both.usage.input_tokens > first.usage.input_tokens


def background(endpoint: Endpoint) -> None:
    """Checks background responses: one that finishes, one that is streamed again, and one that is
    cancelled."""
    fields: dict[str, Any] = {"model": endpoint.model, "input": QUESTION, "background": True}
    with client_of(endpoint) as client:
        queued: Any = client.responses.create(**fields, **SETTINGS)
        assert queued.status in ("queued", "in_progress")
        ended: Any = _ended(client, queued.id)
        assert ended.status in ("completed", "incomplete")
        received: list[Any] = list(client.responses.create(**fields, **SETTINGS, stream=True))
        again: list[Any] = list(
            client.responses.retrieve(received[0].response.id, stream=True, starting_after=1)
        )
        assert [e.model_dump() for e in again] == [e.model_dump() for e in received[2:]]
        long: Any = client.responses.create(
            **fields,
            max_output_tokens=800,
            text={"format": {"type": "json_schema", "name": "long", "schema": LONG}},
        )
        cancelled: Any = client.responses.cancel(long.id)
        assert cancelled.status == "cancelled"
        assert client.responses.retrieve(long.id).status == "cancelled"
        raised(openai.BadRequestError, client.responses.cancel, queued.id)


def tools(endpoint: Endpoint) -> None:
    """Checks a forced call with and without streaming; the result continues the stored response."""
    fields: dict[str, Any] = {"model": endpoint.model, "tools": [FLAT_TOOL]}
    fields |= {"max_output_tokens": 96, "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        forced = {**fields, "input": QUESTION, "tool_choice": choice}
        with client_of(endpoint) as client:
            made: Any = client.responses.create(**forced)
            with client.responses.stream(**forced) as events:
                received: list[Any] = list(events)
            for response in (made, received[-1].response):
                [call] = [item for item in response.output if item.type == "function_call"]
                assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
            written = [
                e.delta for e in received if e.type == "response.function_call_arguments.delta"
            ]
            assert "".join(written) == call.arguments
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            after: Any = client.responses.create(
                **fields,
                input=[result],
                previous_response_id=received[-1].response.id,
                tool_choice="none",
            )
            assert [item.type for item in after.output] == ["message"]


def structured(endpoint: Endpoint) -> None:
    fields: dict[str, Any] = {"model": endpoint.model, "input": QUESTION, "max_output_tokens": 96}
    with client_of(endpoint) as client:
        parsed: Any = client.responses.parse(**fields, text_format=Town)
        assert isinstance(parsed.output_parsed, Town)
        with client.responses.stream(**fields, text_format=Town) as events:
            list(events)
            final: Any = events.get_final_response()
        assert isinstance(final.output_parsed, Town)


def logprobs(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        answer: Any = client.responses.create(
            model=endpoint.model,
            input=QUESTION,
            include=["message.output_text.logprobs"],
            top_logprobs=2,
            **SETTINGS,
        )
    received = answer.output[0].content[0].logprobs
    assert "".join(token.token for token in received).startswith(answer.output_text)
    assert all(len(token.top_logprobs) == 2 for token in received)


def errors(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        for field, value in (("temperature", 3000), ("max_output_tokens", 0), ("inputs", "x")):
            body = {"model": endpoint.model, "input": "x", "extra_body": {field: value}}
            error = raised(openai.BadRequestError, client.responses.create, **body)
            assert error.param == field, error.param
        raised(openai.NotFoundError, client.responses.create, model="nope", input="x")


def _ended(client: Any, response_id: str) -> Any:
    """Waits for the response's final status; returns the response."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        response = client.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
        time.sleep(0.05)
    raise AssertionError("a background response did not finish")


CASES: Mapping[str, Case] = {
    "create": create,
    "stream": stream,
    "stored and deleted": kept_and_forgotten,
    "previous_response_id": previous_response,
    "background, streamed again, cancelled": background,
    "tools": tools,
    "structured outputs": structured,
    "log-probabilities": logprobs,
    "errors": errors,
}
