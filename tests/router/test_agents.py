"""Coding agents get an answer to each of their requests, for as long as a session lasts."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import msgspec
import pytest

from router.metrics.http import MAX_IGNORED_FIELDS, OTHER, IgnoredFields
from tests.support.effort import cases
from tests.support.router.agent import events_of, play, prompt_of
from tests.support.router.agent_clients import (
    CLIENTS,
    PATCH_GRAMMAR,
    PNG,
    SEARCH,
)
from tests.support.router.rig import Rig

WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
PATCH = '*** Begin Patch\n"ü🙂"\\\t\n*** End Patch'
NOTE = "[image omitted: this model takes text only]"


async def send(rig: Rig, name: str, **fields: Any) -> httpx.Response:
    client = CLIENTS[name]
    body = {**client.body, **fields}
    response = await rig.client.post(client.path, json=body, headers=dict(client.headers))
    assert response.status_code == 200, response.text
    return response


def answer_of(response: httpx.Response, path: str) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls of a response, streamed or not."""
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    if "chat" in path:
        return _of_chat(response, is_stream)
    if "messages" in path:
        return _of_messages(response, is_stream)
    items = (events_of(response)[-1]["response"] if is_stream else response.json())["output"]
    texts = [
        part["text"] for item in items if item["type"] == "message" for part in item["content"]
    ]
    calls = [
        (item["name"], item.get("arguments", item.get("input")))
        for item in items
        if item["type"].endswith("_call")
    ]
    return "".join(texts), calls


def _of_chat(response: httpx.Response, is_stream: bool) -> tuple[str, list[tuple[str, Any]]]:
    if not is_stream:
        message = response.json()["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return message["content"] or "", [(call["name"], call["arguments"]) for call in calls]
    deltas = [c["delta"] for event in events_of(response) for c in event["choices"]]
    whole: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        made = whole.setdefault(call["index"], ["", ""])
        made[0] += call["function"].get("name", "")
        made[1] += call["function"]["arguments"]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return text, [(name, arguments) for name, arguments in whole.values()]


def _of_messages(response: httpx.Response, is_stream: bool) -> tuple[str, list[tuple[str, Any]]]:
    if not is_stream:
        blocks = response.json()["content"]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        return "".join(texts), [(b["name"], b["input"]) for b in blocks if "input" in b]
    events = events_of(response)
    texts = [e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta"]
    calls = []
    for event in events:
        if event["type"] == "content_block_start" and "input" in event["content_block"]:
            calls.append([event["content_block"]["name"], ""])
        elif event["type"] == "content_block_delta" and "partial_json" in event["delta"]:
            calls[-1][1] += event["delta"]["partial_json"]
    return "".join(texts), [(name, json.loads(given)) for name, given in calls]


@pytest.mark.parametrize("name", CLIENTS)
async def test_requests_of_agents_are_answered(agent: Rig, name: str) -> None:
    has_tools = "tools" in CLIENTS[name].body
    play(agent, f"I look.\n{WEATHER}" if has_tools else "I look.")
    path = CLIENTS[name].path
    options = {"stream_options": {"include_usage": True}} if "chat" in path else {}
    whole = answer_of(await send(agent, name), path)
    streamed = answer_of(await send(agent, name, stream=True, **options), path)
    assert whole == streamed
    text, calls = whole
    assert text == "I look."
    given = {"city": "Bern"}
    assert [(n, json.loads(g) if isinstance(g, str) else g) for n, g in calls] == (
        [("get_weather", given)] if has_tools else []
    )
    if has_tools:
        prompt = prompt_of(agent)
        assert NOTE in prompt
        assert "sunny" in prompt
        assert PNG[:20] not in prompt


async def test_what_is_ignored_is_counted(agent: Rig) -> None:
    await send(agent, "claude code")
    await send(agent, "codex")
    counts = agent.gateway.http.ignored.counts()
    assert counts == dict.fromkeys(
        [
            ("messages", "tomorrows_field"),
            ("messages", "thinking.tomorrows_option"),
            ("messages", "tools.tomorrows_option"),
            ("messages", "tools.web_search_20250305"),
            ("messages", "context_management.clear_thinking_20251015"),
            ("messages", "context_management.clear_tool_uses_20250919"),
            ("messages", "context_management.compact_20260112"),
            ("responses", "tools.web_search"),
            ("responses", "tools.local_shell"),
            ("responses", "tools.tool_search"),
        ],
        1,
    )
    text = (await agent.client.get("/metrics")).text
    assert 'api="messages",field="tomorrows_field"' in text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_hints_on_the_cache_are_accepted_counted_and_change_no_token(
    agent: Rig, path: str
) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body: dict[str, Any] = {"model": "stub", "seed": 1, "max_tokens": 4, "messages": messages}
    if path == "/v1/responses":
        body = {"model": "stub", "max_output_tokens": 4, "input": messages}
    action = {"action_id": "1", "action_version": 1, "payload": {"ttl_s": 1e9}}
    envelope = {
        "protocol_version": 1,
        "message_id": "m",
        "actions": [action | {"action_type": name} for name in ("retain", "pin_forever")],
    }
    responses = [
        await agent.client.post(path, json=body | hints)
        for hints in ({}, {"kv_hints": envelope}, {"kv_hints": {"actions": [{}]}})
    ]
    plain, hinted, malformed = responses
    assert (plain.status_code, hinted.status_code, malformed.status_code) == (200, 200, 400)
    assert "action_type" in malformed.text
    batches = [batch for worker in agent.workers for batch in worker.batches]
    first, second = (submit for batch in batches for submit in batch.submits)
    assert (first.prompt, first.sampling) == (second.prompt, second.sampling)
    fields = {field for (_, field), count in agent.gateway.http.ignored.counts().items()}
    assert fields == {"kv_hints.retain", "kv_hints.pin_forever"}


@pytest.mark.parametrize("seed", range(cases(60, 9)))
async def test_no_hint_on_the_cache_reaches_a_worker(agent: Rig, seed: int) -> None:
    """So no hint changes a token, and no tenant can keep more pages than its share by hints."""
    rng = random.Random(seed)
    path = ("/v1/chat/completions", "/v1/messages", "/v1/responses")[seed % 3]
    block: dict[str, Any] = {"type": "text", "text": "hello"}
    body: dict[str, Any] = {"model": "stub", "seed": 1, "max_tokens": 4}
    hints: dict[str, Any] = {"kv_hints": random_envelope(rng)}
    hinted = block
    if path == "/v1/messages":
        control = {"type": "ephemeral", "ttl": rng.choice(["5m", "1h"])}
        hinted = block | {"cache_control": control}
        hints |= rng.choice([{}, {"cache_control": control}])
    else:
        hints |= rng.choice([{}, {"prompt_cache_retention": rng.choice(["in_memory", "24h"])}])
    if path == "/v1/responses":
        body = {"model": "stub", "max_output_tokens": 4, "input": "hello"}
    for content, extra in ((block, {}), (hinted, hints)):
        if path != "/v1/responses":
            body["messages"] = [{"role": "user", "content": [content]}]
        response = await agent.client.post(path, json=body | extra)
        assert response.status_code == 200, response.text
    submits = [
        msgspec.structs.asdict(submit)
        | {"request_id": "", "waited_ms": 0.0, "seed": None, "gateway_id": ""}
        for worker in agent.workers
        for batch in worker.batches
        for submit in batch.submits
    ]
    plain, with_hints = (
        fields | {"sampling": msgspec.structs.replace(fields["sampling"], seed=None)}
        for fields in submits
    )
    ignored = {"num_expected_cached", "shared_block"}  # of the same prompt a second time
    assert {k: v for k, v in plain.items() if k not in ignored} == {
        k: v for k, v in with_hints.items() if k not in ignored
    }


def random_envelope(rng: random.Random) -> dict[str, Any]:
    """Known and unknown actions of KvHintsEnvelope with any payload."""
    actions = [
        {
            "action_id": str(number),
            "action_type": rng.choice(["retain", "release", "demote", "prefetch", "pin"]),
            "action_version": rng.randint(0, 3),
            "payload": rng.choice([{}, {"ttl_s": 1e9}, {"pages": [1, 2]}, {"share": 1.0}]),
        }
        for number in range(rng.randint(0, 4))
    ]
    return {"protocol_version": 1, "message_id": "m", "actions": actions}


def test_labels_of_ignored_fields_are_bounded() -> None:
    fields = IgnoredFields()
    for number in range(1000):
        fields.add("messages", f"field_{number}")
    fields.add("messages", 'odd"\n')
    counts = fields.counts()
    assert len(counts) == MAX_IGNORED_FIELDS + 1
    assert sum(counts.values()) == 1001
    assert counts["messages", OTHER] == 1001 - MAX_IGNORED_FIELDS


async def test_unknown_fields_need_the_header_and_own_fields_stay_strict(agent: Rig) -> None:
    client = CLIENTS["claude code"]
    response = await agent.client.post(client.path, json=client.body)
    assert (response.status_code, "tomorrows_field" in response.text) == (400, True)
    for field, value in (("slo", {"ttft": 1}), ("priority", 99), ("seed", "x")):
        response = await agent.client.post(
            client.path, json={**client.body, field: value}, headers=dict(client.headers)
        )
        assert (response.status_code, field in response.text) == (400, True)


async def test_a_search_without_a_search_tool_says_so(agent: Rig) -> None:
    """Claude Code's WebSearch is a request of its own that forces the tool."""
    response = await send(
        agent,
        "claude code",
        tools=[SEARCH],
        tool_choice={"type": "tool", "name": "web_search"},
    )
    assert response.json()["stop_reason"] == "end_turn"
    assert "Be brief.\nTools that are not available: web_search." in prompt_of(agent)


@pytest.mark.parametrize("stream", [False, True])
async def test_custom_tools_have_text_as_input(agent: Rig, stream: bool) -> None:
    given = json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}})
    play(agent, f"<tool_call>{given}</tool_call>")
    response = await send(agent, "codex", stream=stream)
    made = events_of(response)[-1]["response"] if stream else response.json()
    item = made["output"][-1]
    assert item.pop("id").startswith("ctc_")
    assert item.pop("call_id").startswith("call_")
    assert item == {
        "type": "custom_tool_call",
        "name": "apply_patch",
        "input": PATCH,
        "status": "completed",
    }
    if stream:
        kind = "response.custom_tool_call_input"
        deltas = [e["delta"] for e in events_of(response) if e["type"] == f"{kind}.delta"]
        assert "".join(deltas) == PATCH
        assert len(deltas) > 4
        [done] = [e for e in events_of(response) if e["type"] == f"{kind}.done"]
        assert done["input"] == PATCH
    prompt = prompt_of(agent)
    assert "The input must match this Lark grammar" in prompt
    assert "Tools that are not available: web_search, local_shell, tool_search." in prompt


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": 3}', '{"input":3}'),
        ('{"patch": "a\\nb"}', "a\nb"),
        ('{"x": "a", "input": "b"}', "b"),
        ('{"input": "\\ud83d\\ude42 \\u00fc"}', "🙂 ü"),
        ("{}", ""),
    ],
)
async def test_odd_inputs_of_custom_tools(agent: Rig, arguments: str, text: str) -> None:
    play(agent, f'<tool_call>{{"name": "apply_patch", "arguments": {arguments}}}</tool_call>')
    response = await send(agent, "codex", stream=True)
    item = events_of(response)[-1]["response"]["output"][-1]
    assert item["input"] == text


async def test_a_forced_custom_tool_is_held_to_its_grammar(agent: Rig) -> None:
    play(agent, PATCH)
    choice = {"type": "custom", "name": "apply_patch"}
    response = await send(agent, "codex", stream=True, tool_choice=choice, reasoning=None)
    item = events_of(response)[-1]["response"]["output"][-1]
    assert (item["type"], item["input"]) == ("custom_tool_call", PATCH)
    sampling = agent.submits()[-1].sampling
    assert sampling.structured_outputs is not None
    assert sampling.structured_outputs.grammar == PATCH_GRAMMAR
    pattern = {
        "type": "custom",
        "name": "number",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+|x"},
    }
    await send(agent, "codex", tools=[pattern])
    sampling = agent.submits()[-1].sampling
    assert sampling.structured_outputs is not None
    assert '"pattern":"^(?:[0-9]+|x)$"' in sampling.structured_outputs.text


async def test_functions_of_namespaces_keep_their_namespace(agent: Rig) -> None:
    name = "mcp__docs__find"
    play(agent, f'<tool_call>{{"name": "{name}", "arguments": {{"city": "x"}}}}</tool_call>')
    item = (await send(agent, "codex")).json()["output"][-1]
    assert (item["name"], item["namespace"]) == ("find", "mcp__docs__")
    assert f'"name": "{name}", "arguments": {{}}' in prompt_of(agent)


async def test_count_tokens_counts_without_an_engine(agent: Rig) -> None:
    client = CLIENTS["claude code"]
    await send(agent, "claude code")
    prompt = agent.submits()[-1].prompt
    counted = await agent.client.post(
        "/v1/messages/count_tokens", json=client.body, headers=dict(client.headers)
    )
    assert counted.json() == {"input_tokens": len(prompt) // 4}
    assert len(agent.submits()) == 1


async def test_models_are_listed_for_discovery(agent: Rig) -> None:
    listed = (await agent.client.get("/v1/models")).json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "stub", "alias")
    card = listed["data"][0]
    assert (card["context_length"], card["max_output_tokens"]) == (4096, 4095)
    assert (card["type"], card["display_name"]) == ("model", "stub")
