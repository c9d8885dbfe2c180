"""Cases with LiteLLM, instructor and pydantic-ai: plain, streaming, with tools and with output
schemas.

`python -m` runs them in a separate environment, because they pin other versions of OpenAI's client.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import instructor
import litellm
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.campaigns.conformance.cases import (
    TIMEOUT_S,
    Case,
    Endpoint,
    Outcome,
    main,
    raised,
    try_cases,
)

QUESTION = "What is 12 + 30?"
QUESTION_MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
MAX_TOKENS = 96
FUNCTION = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "get_weather"}}

SKIPPED = {
    "LiteLLM: embeddings, images, speech, moderation": "served models generate text",
    "LiteLLM: its proxy": "a separate server in front of this one, which contains the same client",
    "instructor: modes for other vendors' APIs": "this server has OpenAI's and Anthropic's APIs",
    "pydantic-ai: function tools that the model chooses": "depends on the model",
    "pydantic-ai: built-in tools, images, audio": "tools run at the client; text only",
}


class Town(BaseModel):
    """Output schema that always terminates, because clients drop bounds of texts and numbers."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Rome", "Oslo"]
    is_port: bool
    kind: Literal["port", "hill"]


def _litellm(endpoint: Endpoint, **fields: Any) -> Any:
    return litellm.completion(
        model=f"openai/{endpoint.model}",
        api_base=f"{endpoint.base_url}/v1",
        api_key=endpoint.key,
        messages=fields.pop("messages", QUESTION_MESSAGES),
        max_tokens=MAX_TOKENS,
        timeout=TIMEOUT_S,
        num_retries=0,
        seed=7,
        **fields,
    )


def litellm_plain(endpoint: Endpoint) -> None:
    answer = _litellm(endpoint)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def litellm_streamed(endpoint: Endpoint) -> None:
    chunks = list(_litellm(endpoint, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=QUESTION_MESSAGES)
    whole = _litellm(endpoint)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason
    assert built.usage.completion_tokens == whole.usage.completion_tokens


def litellm_tool(endpoint: Endpoint) -> None:
    fields = {"tools": [TOOL], "tool_choice": NAMED}
    whole = _litellm(endpoint, **fields).choices[0].message
    chunks = list(_litellm(endpoint, **fields, stream=True))
    streamed = litellm.stream_chunk_builder(chunks, messages=QUESTION_MESSAGES).choices[0].message
    for message in (whole, streamed):
        [call] = message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    tool_result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    after = _litellm(
        endpoint, messages=[*QUESTION_MESSAGES, whole.model_dump(), tool_result], tools=[TOOL]
    )
    assert after.choices[0].finish_reason


def litellm_structured(endpoint: Endpoint) -> None:
    answer = _litellm(endpoint, response_format=Town)
    Town.model_validate_json(answer.choices[0].message.content)


def litellm_anthropic(endpoint: Endpoint) -> None:
    answer = litellm.completion(
        model=f"anthropic/{endpoint.model}",
        api_base=endpoint.base_url,
        api_key=endpoint.key,
        messages=QUESTION_MESSAGES,
        max_tokens=MAX_TOKENS,
        timeout=TIMEOUT_S,
        tools=[TOOL],
        tool_choice=NAMED,
    )
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def litellm_errors(endpoint: Endpoint) -> None:
    """Checks that LiteLLM maps errors to classes: by status, and overlong prompts by message."""
    long = [{"role": "user", "content": "word " * 9999}]
    raised(litellm.BadRequestError, _litellm, endpoint, temperature=3000)
    raised(litellm.BadRequestError, _litellm, endpoint, messages=long)
    raised(litellm.AuthenticationError, _litellm, endpoint._replace(key="another"))
    raised(litellm.NotFoundError, _litellm, endpoint._replace(model="nope"))


def _instructor(endpoint: Endpoint, mode: Any) -> Any:
    client = OpenAI(
        base_url=f"{endpoint.base_url}/v1", api_key=endpoint.key, max_retries=0, timeout=TIMEOUT_S
    )
    return instructor.from_openai(client, mode=mode)


def _form(endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
    return {
        "model": endpoint.model,
        "messages": QUESTION_MESSAGES,
        "max_tokens": MAX_TOKENS,
        "max_retries": 0,
        "response_model": Town,
        **fields,
    }


def instructor_plain(endpoint: Endpoint) -> None:
    """Checks that requests without a schema return the response unchanged."""
    client = _instructor(endpoint, instructor.Mode.TOOLS)
    answer = client.chat.completions.create(**_form(endpoint, response_model=None))
    assert answer.choices[0].message.content


def instructor_tool(endpoint: Endpoint) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        client = _instructor(endpoint, mode)
        town, raw = client.chat.completions.create_with_completion(**_form(endpoint))
        assert isinstance(town, Town)
        assert raw.choices[0].message.tool_calls


def instructor_structured(endpoint: Endpoint) -> None:
    client = _instructor(endpoint, instructor.Mode.JSON_SCHEMA)
    assert isinstance(client.chat.completions.create(**_form(endpoint)), Town)


def instructor_streamed(endpoint: Endpoint) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = _instructor(endpoint, mode)
        parts = list(client.chat.completions.create_partial(**_form(endpoint)))
        Town.model_validate(parts[-1].model_dump())


def instructor_anthropic(endpoint: Endpoint) -> None:
    client = Anthropic(
        base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0, timeout=TIMEOUT_S
    )
    patched = instructor.from_anthropic(client, mode=instructor.Mode.ANTHROPIC_TOOLS)
    assert isinstance(patched.messages.create(**_form(endpoint)), Town)


def _models(endpoint: Endpoint) -> Iterator[Any]:
    """A model for each API that pydantic-ai supports."""
    openai = OpenAIProvider(base_url=f"{endpoint.base_url}/v1", api_key=endpoint.key)
    yield OpenAIChatModel(endpoint.model, provider=openai)
    yield OpenAIResponsesModel(endpoint.model, provider=openai)
    anthropic = AnthropicProvider(base_url=endpoint.base_url, api_key=endpoint.key)
    yield AnthropicModel(endpoint.model, provider=anthropic)


def _settings() -> Any:
    """Settings without parallel calls: a model that may call again would do so until max_tokens."""
    return {"max_tokens": MAX_TOKENS, "timeout": TIMEOUT_S, "parallel_tool_calls": False}


def pydantic_plain(endpoint: Endpoint) -> None:
    for model in _models(endpoint):
        agent = Agent(model, model_settings=_settings(), instructions="Be brief.")
        first = agent.run_sync(QUESTION)
        assert first.output
        again = agent.run_sync("Why?", message_history=first.all_messages())
        assert again.usage.input_tokens > first.usage.input_tokens


def pydantic_streamed(endpoint: Endpoint) -> None:
    for model in _models(endpoint):
        agent = Agent(model, model_settings=_settings())
        stream = agent.run_stream_sync(QUESTION)
        tool_result = list(stream.stream_text(delta=True))
        assert "".join(tool_result) == stream.get_output()
        assert stream.usage.output_tokens > 0


def pydantic_tool(endpoint: Endpoint) -> None:
    """Checks output as a tool call. With an additional function, the demo model could call that one
    forever."""
    for model in _models(endpoint):
        agent: Any = Agent(model, output_type=ToolOutput(Town), model_settings=_settings())
        assert isinstance(agent.run_sync(QUESTION).output, Town)
        agent = Agent(model, output_type=ToolOutput(Town), model_settings=_settings(), retries=3)
        agent.tool_plain(_get_weather, name="get_weather")
        try:
            result = agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=4))
        except UsageLimitExceeded:
            continue
        assert isinstance(result.output, Town)


def _get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather."""
    return f"sunny in {city}"


def pydantic_structured(endpoint: Endpoint) -> None:
    chat, responses, _ = _models(endpoint)
    for model in (chat, responses):
        agent = Agent(model, output_type=NativeOutput(Town), model_settings=_settings())
        assert isinstance(agent.run_sync(QUESTION).output, Town)
        stream = agent.run_stream_sync(QUESTION)
        assert isinstance(stream.get_output(), Town)


CASES: Mapping[str, Case] = {
    "LiteLLM: plain": litellm_plain,
    "LiteLLM: streamed": litellm_streamed,
    "LiteLLM: tool": litellm_tool,
    "LiteLLM: structured": litellm_structured,
    "LiteLLM: Anthropic's API": litellm_anthropic,
    "LiteLLM: errors": litellm_errors,
    "instructor: plain": instructor_plain,
    "instructor: streamed": instructor_streamed,
    "instructor: tool": instructor_tool,
    "instructor: structured": instructor_structured,
    "instructor: Anthropic's API": instructor_anthropic,
    "pydantic-ai: plain": pydantic_plain,
    "pydantic-ai: streamed": pydantic_streamed,
    "pydantic-ai: tool": pydantic_tool,
    "pydantic-ai: structured": pydantic_structured,
}


def _try_all(endpoint: Endpoint) -> Iterator[Outcome]:
    yield from try_cases("clients", CASES, SKIPPED, endpoint)


if __name__ == "__main__":
    sys.exit(main(_try_all))
