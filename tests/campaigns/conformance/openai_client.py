"""Cases with OpenAI's official client, which validates each response against its types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import openai
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.campaigns.conformance.cases import TIMEOUT_S, Case, Endpoint, raised

QUESTION_MESSAGES: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
SETTINGS: Mapping[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 7}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
STRICT_TOOL: Any = {"type": "function", "function": {**FUNCTION, "strict": True}}
FLAT_TOOL: Any = {"type": "function", **FUNCTION, "strict": True}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}

SKIPPED = {
    "audio, images, videos": "served models only support text",
    "moderations": "served models generate text",
    "files, batches, uploads, vector stores, evals, fine-tuning": "the server stores no files",
    "conversations, containers, skills": "clients send or name earlier turns",
    "responses.compact, input_items, input_tokens": "not served; see /tokenize",
    "chat.completions.list, retrieve, update, delete": "chats are not stored; responses are",
    "realtime, live": "WebSockets are not supported",
}
"""Methods of the client that this server does not support. Each returns 404, which `unserved
routes` checks."""


class Town(BaseModel):
    """Output schema that always terminates."""

    name: str = Field(max_length=12)
    size: int = Field(ge=0, le=999)


@contextmanager
def client_of(
    endpoint: Endpoint, key: str | None = None, *, strict: bool = True
) -> Iterator[OpenAI]:
    """OpenAI's client.

    Args:
        endpoint: the endpoint under test.
        key: API key; None uses the endpoint's.
        strict: whether to reject responses that do not match the client's types.
    """
    with OpenAI(
        base_url=f"{endpoint.base_url}/v1",
        api_key=endpoint.key if key is None else key,
        max_retries=0,
        timeout=TIMEOUT_S,
        _strict_response_validation=strict,
    ) as client:
        yield client


def models(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        assert endpoint.model in [model.id for model in client.models.list()]
        card = client.models.retrieve(endpoint.model)
    assert (card.id, card.object) == (endpoint.model, "model")


def chat(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        raw: Any = client.chat.completions.with_raw_response.create(
            model=endpoint.model, messages=QUESTION_MESSAGES, **SETTINGS
        )
        answer = raw.parse()
    assert answer.id.endswith(raw.headers["x-request-id"])
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= SETTINGS["max_tokens"]
    assert answer.choices[0].finish_reason in ("stop", "length")


def chat_of_every_role(endpoint: Endpoint) -> None:
    """Checks messages as clients return them: `model_dump` of a response, including nulls."""
    with client_of(endpoint) as client:
        complete = client.chat.completions.create
        first: Any = complete(model=endpoint.model, messages=QUESTION_MESSAGES, **SETTINGS)
        messages: list[Any] = [
            {"role": "developer", "content": "Be brief."},
            {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "ann"},
            first.choices[0].message.model_dump(),
            {"role": "user", "content": "And now?"},
        ]
        again: Any = complete(model=endpoint.model, messages=messages, **SETTINGS)
    assert again.usage.prompt_tokens > first.usage.prompt_tokens


def chat_streamed(endpoint: Endpoint) -> None:
    fields: dict[str, Any] = {**SETTINGS, "model": endpoint.model, "messages": QUESTION_MESSAGES}
    fields |= {"n": 2, "logprobs": True, "top_logprobs": 2}
    with client_of(endpoint) as client:
        whole: Any = client.chat.completions.create(**fields)
        with client.chat.completions.stream(
            **fields, stream_options={"include_usage": True}
        ) as stream:
            kinds = {event.type for event in stream}
            final: Any = _final(stream)
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    for one, other in zip(whole.choices, final.choices, strict=True):
        assert one.message.content == other.message.content
        assert one.logprobs.content == other.logprobs.content
        assert one.finish_reason == other.finish_reason


def chat_left_early(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        for _ in range(3):
            stream: Any = client.chat.completions.create(
                model=endpoint.model, messages=QUESTION_MESSAGES, stream=True, max_tokens=200
            )
            next(iter(stream))
            stream.close()
        complete = client.with_options(timeout=0.001).chat.completions.create
        fields: dict[str, Any] = {
            "model": endpoint.model,
            "messages": QUESTION_MESSAGES,
            "max_tokens": 200,
        }
        raised(openai.APITimeoutError, complete, **fields, extra_body={"ignore_eos": True})
        assert list(client.models.list())


def stop_strings(endpoint: Endpoint) -> None:
    fields: dict[str, Any] = {**SETTINGS, "model": endpoint.model, "messages": QUESTION_MESSAGES}
    with client_of(endpoint) as client:
        text: Any = client.chat.completions.create(**fields).choices[0].message.content
        stop = text[-1:]
        answer: Any = client.chat.completions.create(**fields, stop=[stop, "never"])
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", text[: text.index(stop)])
    assert choice.stop_reason == stop


def completions(endpoint: Endpoint) -> None:
    """Checks completions. Some fields are null in OpenAI's own responses, but not in the client's
    types: `finish_reason` of all chunks but the last, and the log-probability of the first
    token."""
    fields: dict[str, Any] = {**SETTINGS, "model": endpoint.model, "max_tokens": 8}
    with client_of(endpoint, strict=False) as client:
        for prompt in ("Once", ["Once", "upon"], [5, 6, 7], [[5, 6], [7, 8, 9]]):
            count = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
            whole: Any = client.completions.create(**fields, prompt=prompt, n=2, logprobs=2)
            chunks = list(client.completions.create(**fields, prompt=prompt, n=2, stream=True))
            assert [choice.index for choice in whole.choices] == list(range(2 * count))
            for choice in whole.choices:
                parts = [one.text for c in chunks for one in c.choices if one.index == choice.index]
                assert "".join(parts) == choice.text
        echoed: Any = client.completions.create(**fields, prompt="Once", echo=True, logprobs=0)
    assert echoed.choices[0].text.startswith("Once")
    assert len(echoed.choices[0].logprobs.tokens) == echoed.usage.total_tokens


def tools(endpoint: Endpoint) -> None:
    """Checks forced calls with and without streaming; the result is returned to the model."""
    for choice in ("required", NAMED):
        with client_of(endpoint) as client:
            fields: dict[str, Any] = {**SETTINGS, "model": endpoint.model, "max_tokens": 96}
            fields |= {"tools": [STRICT_TOOL], "tool_choice": choice, "messages": QUESTION_MESSAGES}
            fields |= {"parallel_tool_calls": False}
            whole: Any = client.chat.completions.create(**fields).choices[0]
            with client.chat.completions.stream(**fields) as stream:
                kinds = {event.type for event in stream}
                final: Any = _final(stream).choices[0]
            [call], [streamed] = whole.message.tool_calls, final.message.tool_calls
            assert "tool_calls.function.arguments.delta" in kinds
            assert call.function.name == streamed.function.name == "get_weather"
            assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
            assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
            assert whole.finish_reason == final.finish_reason
            assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
            tool_result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
            messages = [*QUESTION_MESSAGES, whole.message, tool_result]
            after: Any = client.chat.completions.create(
                **{**fields, "messages": messages, "tool_choice": "none"}
            )
            assert not after.choices[0].message.tool_calls


def structured(endpoint: Endpoint) -> None:
    fields: dict[str, Any] = {**SETTINGS, "model": endpoint.model, "messages": QUESTION_MESSAGES}
    fields |= {"max_tokens": 96}
    with client_of(endpoint) as client:
        parsed: Any = client.chat.completions.parse(**fields, response_format=Town)
        with client.chat.completions.stream(**fields, response_format=Town) as stream:
            final: Any = _final(stream)
        called: Any = client.chat.completions.parse(
            **fields, tools=[openai.pydantic_function_tool(Town)], tool_choice="required"
        )
        loose = {"response_format": {"type": "json_object"}, "temperature": 0}
        text: Any = client.chat.completions.create(**{**fields, **loose}).choices[0]
    assert isinstance(parsed.choices[0].message.parsed, Town)
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Town)
    assert text.message.content.lstrip().startswith("{")


def errors(endpoint: Endpoint) -> None:
    """Checks the exception class, field and code of each error."""
    with client_of(endpoint) as client, client_of(endpoint, "another") as stranger:
        complete = client.chat.completions.create
        good: dict[str, Any] = {"model": endpoint.model, "messages": QUESTION_MESSAGES}
        bad: Any = raised(openai.BadRequestError, complete, **good, temperature=3000)
        assert (bad.param, bad.type) == ("temperature", "invalid_request_error")
        bad = raised(openai.BadRequestError, complete, **good, extra_body={"seeed": 1})
        assert bad.param == "seeed"
        bad = raised(openai.BadRequestError, complete, **good, tool_choice="required")
        assert bad.param == "tool_choice"
        bad = raised(openai.NotFoundError, complete, **{**good, "model": "nope"})
        assert (bad.param, bad.code) == ("model", "model_not_found")
        bad = raised(openai.NotFoundError, client.models.retrieve, "nope")
        assert bad.code == "model_not_found"
        bad = raised(openai.AuthenticationError, stranger.models.list)
        assert bad.code == "invalid_api_key"
        long: Any = [{"role": "user", "content": "word " * 5000}]
        bad = raised(openai.BadRequestError, complete, **{**good, "messages": long})
        assert bad.param == "messages"


def unserved_routes(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        bad = raised(
            openai.BadRequestError, client.embeddings.create, model=endpoint.model, input="a"
        )
        assert bad.param == "model"  # the model generates text
        raised(openai.NotFoundError, client.moderations.create, input="a")
        raised(openai.NotFoundError, client.files.list)
        raised(openai.NotFoundError, client.batches.list)
        raised(openai.NotFoundError, client.conversations.create)
        raised(openai.NotFoundError, client.responses.input_items.list, "resp_1")


def _final(stream: Any) -> Any:
    """Completion assembled by the client, even if max_tokens truncated it."""
    try:
        return stream.get_final_completion()
    except openai.LengthFinishReasonError as error:
        return error.completion


CASES: Mapping[str, Case] = {
    "models": models,
    "chat": chat,
    "chat of every role": chat_of_every_role,
    "chat streamed": chat_streamed,
    "chat left early": chat_left_early,
    "stop strings": stop_strings,
    "completions": completions,
    "tools": tools,
    "structured outputs": structured,
    "errors": errors,
    "unserved routes": unserved_routes,
}
