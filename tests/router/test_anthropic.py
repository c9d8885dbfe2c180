"""/v1/messages over HTTP: requests and responses of Anthropic's clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from router.api.anthropic.protocol import KNOWN
from tests.support.router.agent import CALLS, prompt_of
from tests.support.router.rig import Rig
from worker.protocol.messages import TokenDelta
from worker.protocol.text.chat_template import ChatTemplate

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a place",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
NOW = {"name": "now", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, NOW]
STREAMED = [False, True]
USER = [{"role": "user", "content": "hello"}]


async def send_request(rig: Rig, path: str = "", **fields: Any) -> httpx.Response:
    body = {"model": "stub", "messages": USER, "max_tokens": 200, **fields}
    return await rig.client.post(f"/v1/messages{path}", json=body)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each event's name matches its data."""
    made = []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    return made


def joined(response: httpx.Response) -> dict[str, Any]:
    """The message assembled from a stream; blocks are consecutive."""
    begun, *events, ended, stop = events_of(response)
    assert (begun["type"], ended["type"], stop["type"]) == (
        "message_start",
        "message_delta",
        "message_stop",
    )
    message: dict[str, Any] = begun["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open = False
    for event in events:
        if event["type"] == "ping":
            continue
        assert event["index"] == len(message["content"]) - is_open
        if event["type"] == "content_block_start":
            message["content"].append({**event["content_block"], "json": ""})
            is_open = True
        elif event["type"] == "content_block_stop":
            block = message["content"][-1]
            block |= {"input": json.loads(block["json"])} if "input" in block else {}
            del block["json"]
            is_open = False
        else:
            delta, block = event["delta"], message["content"][-1]
            kind = delta.pop("type")
            [(name, text)] = delta.items()
            block["json" if kind == "input_json_delta" else name] += text
    assert not is_open
    return {**message, **ended["delta"], "usage": ended["usage"]}


async def answer(rig: Rig, stream: bool, **fields: Any) -> dict[str, Any]:
    response = await send_request(rig, stream=stream, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    return joined(response) if stream else response.json()


@pytest.mark.parametrize("stream", STREAMED)
async def test_text(agent: Rig, stream: bool) -> None:
    message = await answer(agent, stream, system="Be short.")
    assert message.pop("id").startswith("msg_")
    usage = message.pop("usage")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "stub",
        "content": [{"type": "text", "text": agent.answer}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage["output_tokens"] == len(agent.script(None))
    prompt = memoryview(agent.submits()[0].prompt).cast("i")
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)
    assert "<|im_start|>system\nBe short.<|im_end|>" in prompt_of(agent)


@pytest.mark.parametrize("stream", STREAMED)
async def test_calls_behind_thoughts(agent: Rig, stream: bool) -> None:
    agent.answer = f"hm\n</think>\n\n{CALLS}"
    thinking = {"type": "enabled", "budget_tokens": 4096}
    message = await answer(agent, stream, tools=TOOLS, thinking=thinking)
    ids = [block.pop("id") for block in message["content"] if "id" in block]
    assert len(set(ids)) == 2
    assert all(call_id.startswith("toolu_") for call_id in ids)
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": message["id"]},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Bern"}},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert "<think>\n\n</think>" not in prompt_of(agent)


@pytest.mark.parametrize("stream", STREAMED)
async def test_thoughts_may_be_left_out(agent: Rig, stream: bool) -> None:
    agent.answer = "hm\n</think>\n\nyes"
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    message = await answer(agent, stream, thinking=thinking)
    assert message["content"] == [{"type": "text", "text": "yes"}]
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize("stream", STREAMED)
@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({"max_tokens": 3}, ("max_tokens", None)),
        ({"stop_sequences": ["quick"]}, ("stop_sequence", "quick")),
        ({}, ("end_turn", None)),
    ],
)
async def test_why_it_ends(agent: Rig, stream: bool, fields: Any, ending: Any) -> None:
    message = await answer(agent, stream, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == ending


@pytest.mark.parametrize(
    ("choice", "names", "single_call"),
    [
        ({"type": "any"}, ["get_weather", "now"], False),
        ({"type": "any", "disable_parallel_tool_use": True}, ["get_weather", "now"], True),
        ({"type": "tool", "name": "now"}, ["now"], True),
    ],
)
async def test_forced_calls(agent: Rig, choice: Any, names: list[str], single_call: bool) -> None:
    agent.answer = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    message = await answer(agent, False, tools=TOOLS, tool_choice=choice)
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    assert message["stop_reason"] == "tool_use"
    sampling = agent.submits()[0].sampling
    form = json.loads(sampling.structured_outputs.structural_tag)["format"]
    assert [tag["begin"].split('"')[3] for tag in form["tags"]] == names
    assert form["stop_after_first"] == single_call


async def test_history(agent: Rig) -> None:
    """Tool results come before other user content; consecutive messages of a role are one turn."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Bern"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    messages = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "s"},
                {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}},
                call,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "three"},
                {**result, "content": [{"type": "text", "text": "sun"}], "is_error": True},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: 7"},
        {"type": "text", "text": "Be short."},
    ]
    await answer(agent, False, messages=messages, system=system)
    assert prompt_of(agent) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nI look."
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nError: sun<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


async def test_an_assistant_message_is_continued(agent: Rig) -> None:
    messages = [*USER, {"role": "assistant", "content": "I say"}]
    await answer(agent, False, messages=messages)
    assert prompt_of(agent).endswith("<|im_start|>assistant\nI say")


async def test_the_form_and_our_own_fields(agent: Rig) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    agent.answer = "{}"
    message = await answer(
        agent, False, output_config={"format": form, "effort": "low"}, seed=7, priority=2
    )
    assert message["content"] == [{"type": "text", "text": "{}"}]
    submit = agent.submits()[0]
    assert (submit.seed, submit.priority) == (7, 2)
    assert json.loads(submit.sampling.structured_outputs.json) == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"max_tokens": None}, "max_tokens: Expected `int`"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "content[0].type must"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
        (
            {"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use"}]}]},
            "messages[1].content[0].name",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": ""}]}, "messages must end with"),
        ({"system": [{"text": "x"}]}, "system[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "content[0].type tool_",
        ),
        ({"tools": [{"type": "surprise_1", "name": "x"}]}, "tools[0].type surprise_1"),
        ({"context_management": {"edits": [{"type": "x"}]}}, "context_management"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type bash_20250124"),
        ({"tools": [{"name": "now"}]}, "tools[0]"),
        ({"tools": [{**NOW, "surprise": 1}]}, "surprise"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 3}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config"),
        ({"metadata": {"user": "x"}}, "metadata"),
        ({"stop": ["x"]}, "unknown field stop"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"temperature": 3000}, "temperature"),
    ],
)
async def test_what_is_wrong_is_named(agent: Rig, fields: Any, what: str) -> None:
    response = await send_request(agent, **fields)
    body = response.json()
    assert (response.status_code, body["type"]) == (400, "error")
    assert body["error"]["type"] == "invalid_request_error"
    assert what in body["error"]["message"]
    assert body["request_id"] == response.headers["x-request-id"]
    assert agent.submits() == []


async def test_effort_is_ignored_where_nothing_reads_it(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start()
    template = ChatTemplate("{{ messages[0].content }}", {})
    monkeypatch.setattr(rig.gateway.model("stub").tokenizer, "_template", template)
    for path, fields in (
        ("", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("/count_tokens", {"output_config": {"effort": "low"}}),
    ):
        assert (await send_request(rig, path, **fields)).status_code == 200
    response = await send_request(rig, tools=TOOLS)
    assert "does not support tools" in response.json()["error"]["message"]


async def test_fields_without_effect_have_none(agent: Rig) -> None:
    ignored: dict[str, Any] = {name: {"surely": "harmless"} for name in KNOWN.ignored}
    for name, refused in KNOWN.unsupported.items():
        ignored[name] = None
        for value in refused.harmless:
            assert (await send_request(agent, **{name: value})).status_code == 200
    assert (await send_request(agent, **ignored)).status_code == 200


async def test_errors_are_anthropics(rig: Any) -> None:
    await rig.start(api_keys=("secret",))
    post_with = rig.client.post
    body = {"model": "stub", "messages": USER, "max_tokens": 5}
    kinds = {}
    for name, headers, path, change in (
        ("key", {"x-api-key": "wrong"}, "/v1/messages", {}),
        ("model", {"x-api-key": "secret"}, "/v1/messages", {"model": "nope"}),
        ("path", {"x-api-key": "secret"}, "/v1/messages/batches", {}),
        ("bearer", {"authorization": "Bearer secret"}, "/v1/messages", {}),
        ("both", {"authorization": "Bearer no", "x-api-key": "secret"}, "/v1/messages", {}),
    ):
        response = await post_with(path, json={**body, **change}, headers=headers)
        kinds[name] = (response.status_code, response.json().get("error", {}).get("type"))
    for worker in rig.workers:
        worker.rejection, worker.rejection_status = "full", 429
    response = await post_with("/v1/messages", json=body, headers={"x-api-key": "secret"})
    assert kinds == {
        "key": (401, "authentication_error"),
        "model": (404, "not_found_error"),
        "path": (404, "not_found_error"),
        "bearer": (200, None),
        "both": (401, "authentication_error"),
    }
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    chat = {"model": "nope", "messages": USER}
    other = await post_with("/v1/chat/completions", json=chat, headers={"x-api-key": "secret"})
    assert other.json()["error"]["code"] == "model_not_found"


async def test_an_error_ends_a_stream(rig: Any) -> None:
    await rig.start(running=False)
    asking = asyncio.create_task(send_request(rig, stream=True))
    await rig.until(lambda: any(worker.running for worker in rig.workers))
    for worker in rig.workers:
        if worker.running:
            worker.step()
            [request_id] = worker.running
            await asyncio.sleep(0.05)
            worker.running.clear()
            worker.update([TokenDelta(request_id, 0, [], "error", error="it broke")], [])
    events = events_of(await asking)
    assert [event["type"] for event in events][:2] == ["message_start", "ping"]
    assert events[-1]["error"] == {"type": "api_error", "message": "it broke"}


async def test_tokens_are_counted_as_the_model_gets_them(agent: Rig) -> None:
    fields = {"tools": TOOLS, "system": "Be short.", "stream": True, "temperature": 1.0}
    counted = await send_request(agent, "/count_tokens", **fields)
    assert counted.status_code == 200, counted.text
    await send_request(agent, **fields)
    prompt = memoryview(agent.submits()[0].prompt).cast("i")
    assert counted.json() == {"input_tokens": len(prompt)}
    wrong = await send_request(agent, "/count_tokens", messages=[])
    assert wrong.json()["error"]["type"] == "invalid_request_error"
