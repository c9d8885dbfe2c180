"""Cases with Anthropic's official client, which validates each response against its types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import anthropic
from anthropic import Anthropic
from pydantic import BaseModel

from tests.campaigns.conformance.cases import TIMEOUT_S, Case, Endpoint, raised
from tests.campaigns.conformance.openai_client import PARAMETERS

QUESTION_MESSAGES: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
TOOL: Any = {"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 7}
"""Sampling fields that the client has no parameters for."""

SKIPPED = {
    "models.list, models.retrieve": "/v1/models answers in OpenAI's form, at the same path",
    "messages.batches, files, skills, organization": "not served",
    "images, PDFs, citations, server tools": "text only; tools run at the client",
}


class Where(BaseModel):
    """Output schema that always terminates, because this client drops bounds."""

    city: Literal["Rome", "Oslo"]


@contextmanager
def client_of(endpoint: Endpoint, key: str | None = None) -> Iterator[Any]:
    """A client that rejects responses that do not match its types."""
    with Anthropic(
        base_url=endpoint.base_url,
        api_key=endpoint.key if key is None else key,
        max_retries=0,
        timeout=TIMEOUT_S,
        _strict_response_validation=True,
    ) as client:
        yield client


def messages(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        raw: Any = client.messages.with_raw_response.create(
            model=endpoint.model, messages=QUESTION_MESSAGES, max_tokens=24, system="Be brief."
        )
        answer = raw.parse()
        bearer = client.copy(api_key=None, auth_token=endpoint.key)
        assert bearer.messages.create(
            model=endpoint.model, messages=QUESTION_MESSAGES, max_tokens=2
        )
    assert raw.headers["request-id"]
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", endpoint.model)
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens <= 24


def streamed(endpoint: Endpoint) -> None:
    """Checks that streaming and non-streaming responses with the same seed are equal."""
    fields: dict[str, Any] = {
        "model": endpoint.model,
        "messages": QUESTION_MESSAGES,
        "max_tokens": 48,
    }
    for extra in ({}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}):
        with client_of(endpoint) as client:
            whole = client.messages.create(**fields, **extra, extra_body=SEEDED)
            with client.messages.stream(**fields, **extra, extra_body=SEEDED) as stream:
                kinds = [event.type for event in stream]
                final = stream.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        left = {"id", "signature", "parsed_output", "citations"}
        one, other = (
            [block.model_dump(exclude=left) for block in answer.content]
            for answer in (whole, final)
        )
        assert one == other
        assert whole.stop_reason == final.stop_reason
        assert whole.usage.output_tokens == final.usage.output_tokens


def stop_sequences(endpoint: Endpoint) -> None:
    fields: dict[str, Any] = {
        "model": endpoint.model,
        "messages": QUESTION_MESSAGES,
        "max_tokens": 48,
    }
    with client_of(endpoint) as client:
        text = client.messages.create(**fields, extra_body=SEEDED).content[0].text
        stop = text[-1:]
        answer = client.messages.create(**fields, stop_sequences=[stop], extra_body=SEEDED)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


def tools(endpoint: Endpoint) -> None:
    """Checks forced calls with and without streaming; the result is returned to the model."""
    fields: dict[str, Any] = {"model": endpoint.model, "tools": [TOOL], "max_tokens": 96}
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        forced = {**fields, "messages": QUESTION_MESSAGES}
        forced["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
        with client_of(endpoint) as client:
            whole: Any = client.messages.create(**forced, extra_body=SEEDED)
            with client.messages.stream(**forced, extra_body=SEEDED) as stream:
                arguments = "".join(e.partial_json for e in stream if e.type == "input_json")
                final: Any = stream.get_final_message()
            for answer in (whole, final):
                call = answer.content[-1]
                assert (answer.stop_reason, call.type) == ("tool_use", "tool_use")
                assert call.input["city"] in ("Rome", "Oslo")
            assert whole.content[-1].input == final.content[-1].input
            assert arguments
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
            after = client.messages.create(
                **fields,
                messages=[
                    *QUESTION_MESSAGES,
                    {"role": "assistant", "content": final.content},
                    {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
                ],
                tool_choice={"type": "none"},
            )
            assert all(block.type == "text" for block in after.content)


def structured(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        parsed = client.messages.parse(
            model=endpoint.model, messages=QUESTION_MESSAGES, max_tokens=96, output_format=Where
        )
        assert isinstance(parsed.parsed_output, Where)


def count_tokens(endpoint: Endpoint) -> None:
    fields: dict[str, Any] = {
        "model": endpoint.model,
        "messages": QUESTION_MESSAGES,
        "tools": [TOOL],
    }
    with client_of(endpoint) as client:
        counted = client.messages.count_tokens(**fields, system="Be brief.")
        usage = client.messages.create(**fields, system="Be brief.", max_tokens=1).usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached


def errors(endpoint: Endpoint) -> None:
    fields: dict[str, Any] = {
        "model": endpoint.model,
        "messages": QUESTION_MESSAGES,
        "max_tokens": 4,
    }
    with client_of(endpoint) as client, client_of(endpoint, "another") as stranger:
        for kind, call, changed in (
            (anthropic.BadRequestError, client.messages.create, {"max_tokens": 0}),
            (anthropic.BadRequestError, client.messages.create, {"extra_body": {"top_p": 3}}),
            (anthropic.BadRequestError, client.messages.create, {"extra_body": {"tooos": []}}),
            (anthropic.NotFoundError, client.messages.create, {"model": "nope"}),
            (anthropic.AuthenticationError, stranger.messages.create, {}),
        ):
            body: Any = raised(kind, call, **{**fields, **changed}).body
            assert body["type"] == "error", body
            assert body["error"]["message"], body


CASES: Mapping[str, Case] = {
    "messages": messages,
    "streamed": streamed,
    "stop_sequences": stop_sequences,
    "tools": tools,
    "structured outputs": structured,
    "count_tokens": count_tokens,
    "errors": errors,
}
