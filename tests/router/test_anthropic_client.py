"""Checks /v1/messages with Anthropic's official client: fields, accumulated streams, errors.

Tests import it themselves, as that takes 1.5 s in every process that collects them.
"""

from __future__ import annotations

from typing import Any

import pytest

from router.api.anthropic.protocol import COUNTED, KNOWN, CountTokensRequest, MessagesRequest
from tests.support.router.agent import CALLS, prompt_of
from tests.support.router.rig import Rig

NOW = {"name": "now", "input_schema": {"type": "object"}}
WEATHER = {"name": "get_weather", "input_schema": {"type": "object"}}
ASKED: dict[str, Any] = {
    "model": "stub",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 200,
}


def test_every_field_is_known() -> None:
    """Every field is supported, ignored, or rejected with an error that names it."""
    import anthropic

    types = anthropic.types
    created = {
        *types.message_create_params.MessageCreateParamsStreaming.__annotations__,
        *types.message_create_params.MessageCreateParamsBase.__annotations__,
    }
    served = set(MessagesRequest.__struct_fields__)
    assert created - served - KNOWN.ignored - set(KNOWN.unsupported) == set()
    assert not served & (KNOWN.ignored | set(KNOWN.unsupported))
    counted = set(types.message_count_tokens_params.MessageCountTokensParams.__annotations__)
    served = set(CountTokensRequest.__struct_fields__)
    assert counted - served - COUNTED.ignored - set(COUNTED.unsupported) == set()


async def test_a_stream_adds_up_to_the_whole(agent: Rig) -> None:
    import anthropic

    agent.answer = f"hm\n</think>\n\n{CALLS}"
    thinking = {"type": "enabled", "budget_tokens": 2048}
    body_fields = {**ASKED, "tools": [WEATHER, NOW], "thinking": thinking}
    async with (
        agent.server() as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client,
    ):
        whole = await client.messages.create(**body_fields)
        async with client.messages.stream(**body_fields) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        counted = await client.messages.count_tokens(
            model="stub",
            messages=body_fields["messages"],
            tools=body_fields["tools"],
            thinking=thinking,
        )
        again = await client.messages.create(
            **{
                **body_fields,
                "messages": [
                    *body_fields["messages"],
                    {"role": "assistant", "content": whole.content},
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": block.id, "content": "7"}
                            for block in whole.content
                            if block.type == "tool_use"
                        ],
                    },
                ],
            }
        )
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert final.stop_reason == whole.stop_reason == "tool_use"
    outputs = [
        [block.model_dump(exclude={"id", "signature", "parsed_output"}) for block in answer.content]
        for answer in (whole, final)
    ]
    assert outputs[0] == outputs[1]
    assert [block["type"] for block in outputs[0]] == ["thinking", "text", "tool_use", "tool_use"]
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert again.type == "message"
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}' in prompt_of(agent)


async def test_a_call_that_is_cut_off_is_what_the_client_makes_of_it(agent: Rig) -> None:
    import anthropic

    agent.answer = '<tool_call>{"name": "now", "arguments": {"a": [1], "b": "x y z"}}</tool_call>'
    length = len(agent.tokenizer.encode(agent.answer.partition(" y")[0]))
    body_fields = {**ASKED, "tools": [NOW], "max_tokens": length}
    async with (
        agent.server() as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client,
    ):
        whole = await client.messages.create(**body_fields)
        async with client.messages.stream(**body_fields) as stream:
            outputs = [event.partial_json async for event in stream if event.type == "input_json"]
            final = await stream.get_final_message()
    for answer in (whole, final):
        [block] = answer.content
        assert (block.type, answer.stop_reason) == ("tool_use", "max_tokens")
        assert block.input == {"a": [1]}
    assert "".join(outputs) == '{"a":[1],"b":"x'
    assert len(outputs) > 2


async def test_error_classes(rig: Any) -> None:
    import anthropic

    await rig.start(api_keys=("secret",))
    async with (
        rig.server() as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="secret", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.BadRequestError, match="top_p"):
            await client.messages.create(**ASKED, extra_body={"top_p": 3})
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**ASKED, "model": "nope"})
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(**ASKED)
        bearer = client.copy(api_key=None, auth_token="secret")
        assert (await bearer.messages.create(**{**ASKED, "max_tokens": 3})).type == "message"
