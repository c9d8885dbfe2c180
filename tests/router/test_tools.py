"""Chats with tools and reasoning over HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.router.agent import CALLS, prompt_of
from tests.support.router.official_client import client_of
from tests.support.router.rig import Rig

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
NAMED = {"type": "function", "function": {"name": "now"}}
STREAMED = [False, True]


async def answer(rig: Rig, events: Any, stream: bool, **fields: Any) -> tuple[dict, str, dict]:
    """(message, finish reason, usage) of the only choice, assembled if it is streamed."""
    if not stream:
        response = await rig.chat(**fields)
        assert response.status_code == 200, response.text
        [choice] = response.json()["choices"]
        return choice["message"], choice["finish_reason"], response.json()["usage"]
    options = {"include_usage": True}
    response = await rig.chat(stream=True, stream_options=options, **fields)
    assert response.status_code == 200, response.text
    *chunks, last = events(response)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                assert (part["type"], part["function"]["arguments"]) == ("function", "")
                calls.append({"id": part["id"], "type": "function", "function": part["function"]})
            else:
                assert set(part) == {"index", "function"}
                assert set(part["function"]) == {"arguments"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    message["content"] = message["content"] or None
    return message, chunks[-1]["choices"][0]["finish_reason"], last["usage"]


@pytest.mark.parametrize("stream", STREAMED)
async def test_calls(agent: Rig, events: Any, stream: bool) -> None:
    agent.answer = CALLS
    message, reason, _ = await answer(agent, events, stream, tools=TOOLS)
    assert (message["content"], reason) == ("I look.", "tool_calls")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city":"Bern"}'},
        {"name": "now", "arguments": "{}"},
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", call_id) for call_id in ids)
    assert '"name": "get_weather"' in prompt_of(agent)
    assert agent.submits()[0].sampling.structured_outputs is None


@pytest.mark.parametrize("stream", STREAMED)
async def test_one_call_where_they_may_not_be_parallel(
    agent: Rig, events: Any, stream: bool
) -> None:
    agent.answer = CALLS
    message, reason, _ = await answer(agent, events, stream, tools=TOOLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    assert reason == "tool_calls"


@pytest.mark.parametrize("stream", STREAMED)
@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_no_calls_without_tools(agent: Rig, events: Any, stream: bool, fields: Any) -> None:
    agent.answer = CALLS
    message, reason, _ = await answer(agent, events, stream, **fields)
    assert message == {"role": "assistant", "content": CALLS}
    assert reason == "stop"
    assert "get_weather" not in prompt_of(agent)


@pytest.mark.parametrize("stream", STREAMED)
@pytest.mark.parametrize(
    "text", ['<tool_call>{"name": "now"', "<tool_call>what</tool_call>", "a </tool_call> b"]
)
async def test_what_is_no_call_is_text(agent: Rig, events: Any, stream: bool, text: str) -> None:
    agent.answer = text
    message, reason, _ = await answer(agent, events, stream, tools=TOOLS)
    assert message == {"role": "assistant", "content": text}
    assert reason == "stop"


async def test_arguments_come_as_they_are_written(agent: Rig, events: Any) -> None:
    city = "a city of seven or eight words and more"
    agent.answer = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}'
    chunks = events(await agent.chat(stream=True, tools=TOOLS))
    parts = [
        call["function"]["arguments"]
        for chunk in chunks
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert "".join(parts) == f'{{"city":"{city}"}}'
    assert len(parts) > 6


@pytest.mark.parametrize("stream", STREAMED)
async def test_a_call_that_is_cut_off_is_as_far_as_it_came(
    agent: Rig, events: Any, stream: bool
) -> None:
    agent.answer = '<tool_call>{"name": "now", "arguments": {"a": 1, "b": "x y z"}}</tool_call>'
    length = len(agent.tokenizer.encode(agent.answer.partition(" y")[0]))
    message, reason, _ = await answer(agent, events, stream, tools=TOOLS, max_tokens=length)
    [call] = message["tool_calls"]
    assert (call["function"]["arguments"], reason) == ('{"a":1,"b":"x', "length")


@pytest.mark.parametrize("stream", STREAMED)
@pytest.mark.parametrize(
    ("choice", "reason", "names"),
    [
        ("required", "tool_calls", ["get_weather", "now"]),
        (NAMED, "stop", ["now"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
            "tool_calls",
            ["now"],
        ),
    ],
)
async def test_forced_calls(
    agent: Rig, events: Any, stream: bool, choice: Any, reason: str, names: list[str]
) -> None:
    agent.answer = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    message, finish_reason, _ = await answer(
        agent, events, stream, tools=TOOLS, tool_choice=choice, reasoning_effort="high"
    )
    assert (message["content"], finish_reason) == (None, reason)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
    form = json.loads(agent.submits()[0].sampling.structured_outputs.structural_tag)["format"]
    assert form["at_least_one"]
    assert form["stop_after_first"] == (choice == NAMED)
    assert [re.findall('"name": "([a-z_]+)"', tag["begin"])[0] for tag in form["tags"]] == names


async def test_a_length_stays_one(agent: Rig, events: Any) -> None:
    agent.answer = '<tool_call>{"name": "now"}</tool_call>' + " and so on" * 5
    length = len(agent.tokenizer.encode(agent.answer)) - 3
    message, reason, _ = await answer(agent, events, False, tools=TOOLS, max_tokens=length)
    assert (len(message["tool_calls"]), reason) == (1, "length")


@pytest.mark.parametrize("stream", STREAMED)
@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_thoughts(agent: Rig, events: Any, stream: bool, shows: bool, tools: Any) -> None:
    agent.answer = "one two\n</think>\n\nfour"
    message, reason, usage = await answer(
        agent, events, stream, reasoning_effort="low", include_reasoning=shows, tools=tools
    )
    expected = {"role": "assistant", "content": "four"}
    assert message == ({**expected, "reasoning": "one two"} if shows else expected)
    assert reason == "stop"
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]


@pytest.mark.parametrize("fields", [{"reasoning_effort": "low"}, {"tools": TOOLS}])
async def test_continuous_usage_counts_thoughts(agent: Rig, events: Any, fields: Any) -> None:
    agent.answer = "one two\n</think>\n\nfour"
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await agent.chat(stream=True, stream_options=options, **fields)
    assert response.status_code == 200, response.text
    usages = [chunk["usage"] for chunk in events(response)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts[0] == 0 < counts[-1]
    assert counts == sorted(counts)
    thoughts = [usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages]
    assert thoughts == sorted(thoughts)
    assert (thoughts[-1] > 0) == ("reasoning_effort" in fields)


@pytest.mark.parametrize("stream", STREAMED)
async def test_a_thought_without_an_end(agent: Rig, events: Any, stream: bool) -> None:
    agent.answer = "one two three"
    message, _, usage = await answer(agent, events, stream, reasoning_effort="max")
    assert message == {"role": "assistant", "content": None, "reasoning": "one two three"}
    details = usage["completion_tokens_details"]
    assert details["reasoning_tokens"] == usage["completion_tokens"]


async def test_a_form_is_all_of_the_text(agent: Rig, events: Any) -> None:
    agent.answer = '{"a": 1}'
    fields = {"response_format": {"type": "json_object"}, "reasoning_effort": "high"}
    message, _, _ = await answer(agent, events, False, **fields)
    assert message["content"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "tools"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [3]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {**NAMED, "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 3}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_what_is_malformed_is_named(agent: Rig, fields: Any, param: str) -> None:
    response = await agent.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert agent.submits() == []


async def test_a_model_without_tools_or_documents_says_so(rig: Any) -> None:
    await rig.start()
    for fields in ({"tools": TOOLS}, {"documents": [{"text": "x"}]}):
        response = await rig.chat(**fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] in fields


@pytest.mark.parametrize("end", ["", " ", "\n\n"])
async def test_a_message_is_continued(agent: Rig, end: str) -> None:
    messages = [
        {"role": "user", "content": "Count. one two"},
        {"role": "assistant", "content": "one two" + end},
    ]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    body = {"messages": messages, **fields}
    response = await agent.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert prompt_of(agent).endswith("<|im_start|>assistant\none two" + end)
    body["add_generation_prompt"] = True
    assert (await agent.client.post("/v1/chat/completions", json=body)).status_code == 400


async def test_reasoning_is_continued(agent: Rig) -> None:
    agent.answer = "and four</think>five"
    messages = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "<think>one two"},
    ]
    body = {"messages": messages, "continue_final_message": True}
    response = await agent.client.post("/v1/chat/completions", json=body)
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("and four", "five")


async def test_documents_reach_the_template(agent: Rig) -> None:
    response = await agent.chat(documents=[{"text": "the fox"}])
    assert response.status_code == 200, response.text
    assert "doc: the fox\n" in prompt_of(agent)


@pytest.mark.parametrize("stream", STREAMED)
async def test_tokens_and_logprobs_are_all_there(agent: Rig, events: Any, stream: bool) -> None:
    """Text is held back while it may be a call; content beside it is not."""
    agent.answer = CALLS
    fields = {"tools": TOOLS, "return_token_ids": True}
    if not stream:
        [choice] = (await agent.chat(**fields)).json()["choices"]
        assert choice["token_ids"] == agent.script(None)
        return
    chunks = events(await agent.chat(stream=True, **fields))
    choices = [chunk["choices"][0] for chunk in chunks]
    ids = [i for choice in choices for i in choice.get("token_ids", ())]
    assert ids == agent.script(None)


async def test_the_official_client_puts_a_stream_together(agent: Rig) -> None:
    agent.answer = CALLS
    tools: list[Any] = TOOLS
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    async with client_of(agent) as client:
        async with client.chat.completions.stream(
            model="stub", messages=messages, tools=tools
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        [choice] = final.choices
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls or []
        assert [call.function.arguments for call in calls] == ['{"city":"Bern"}', "{}"]
        agent.answer = "one"
        messages += [
            choice.message.model_dump(),
            *({"role": "tool", "tool_call_id": call.id, "content": "7"} for call in calls),
        ]
        last = await client.chat.completions.create(model="stub", messages=messages, tools=tools)
    assert last.choices[0].message.content == "one"
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}' in prompt_of(agent)
