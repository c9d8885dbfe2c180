"""/v1/responses over HTTP: requests, events, and stored responses per key."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.responses.protocol import KNOWN, ResponsesRequest
from router.api.responses.store import OVERHEAD, ResponseStore, Stored
from router.errors import ApiError
from tests.support.router.agent import CALLS, prompt_of
from tests.support.router.official_client import client_of
from tests.support.router.rig import Rig

WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
NOW = {"type": "function", "name": "now", "parameters": None, "strict": None}
TOOLS: list[Any] = [WEATHER, NOW]
STREAMED = [False, True]
PATH = "/v1/responses"


async def send_request(rig: Rig, given: Any = "hello", /, **fields: Any) -> httpx.Response:
    body = {"model": "stub", "input": given, **fields}
    return await rig.client.post(PATH, json=body)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream with sequence numbers; each event's name matches its data."""
    made = []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    return made


async def answer(rig: Rig, stream: bool, given: Any = "hello", /, **fields: Any) -> dict[str, Any]:
    response = await send_request(rig, given, stream=stream, **fields)
    assert response.status_code == 200, response.text
    if not stream:
        return response.json()
    last = events_of(response)[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    whole: dict[str, Any] = last["response"]
    return whole


def kept_ids(rig: Rig) -> list[str]:
    """Ids of the stored responses."""
    [route] = [r for r in rig.app.routes if getattr(r, "path", "") == PATH]
    store = route.endpoint.__self__._store
    return [key for shelf in store._by_key.values() for key in shelf.entries]


async def outcome(rig: Rig, response_id: str) -> dict[str, Any]:
    """A completed background response."""
    while True:
        found: dict[str, Any] = (await rig.client.get(f"{PATH}/{response_id}")).json()
        if found["status"] != "queued":
            return found
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("stream", STREAMED)
async def test_text(agent: Rig, stream: bool) -> None:
    body_fields = {"instructions": "Be short.", "metadata": {"a": "b"}, "temperature": 0.5}
    response = await answer(agent, stream, **body_fields)
    [item] = response["output"]
    assert item.pop("id").startswith("msg_")
    text = {"type": "output_text", "text": agent.answer, "annotations": [], "logprobs": []}
    assert item == {
        "type": "message",
        "role": "assistant",
        "content": [text],
        "status": "completed",
    }
    assert response["status"] == "completed"
    assert {name: response[name] for name in body_fields} == body_fields
    usage = response["usage"]
    prompt = memoryview(agent.submits()[0].prompt).cast("i")
    assert usage["input_tokens"] == len(prompt)
    assert usage["total_tokens"] == len(prompt) + usage["output_tokens"]
    assert "<|im_start|>system\nBe short.<|im_end|>" in prompt_of(agent)


async def test_order_of_events(agent: Rig) -> None:
    agent.answer = f"hm\n</think>\n\n{CALLS}"
    response = await send_request(agent, stream=True, tools=TOOLS, reasoning={"effort": "high"})
    events = events_of(response)
    received: list[str] = []
    for event in events:
        if not received or received[-1] != event["type"]:
            received.append(event["type"].removeprefix("response."))
    received = [
        kind for place, kind in enumerate(received) if not place or kind != received[place - 1]
    ]
    opened, closed = ["output_item.added"], ["output_item.done"]
    part = ["content_part.added"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert received == [
        *("created", "in_progress"),
        *(*opened, *part, "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", *closed),
        *(*opened, *part, "output_text.delta", "output_text.done", "content_part.done", *closed),
        *(*opened, *call, *closed),
        *(*opened, *call, *closed),
        "completed",
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in done]


@pytest.mark.parametrize("stream", STREAMED)
async def test_a_conversation_continues(agent: Rig, stream: bool) -> None:
    """By its id, and equally by its items."""
    agent.answer = f"hm\n</think>\n\n{CALLS}"
    first = await answer(
        agent, stream, tools=TOOLS, reasoning={"effort": "low"}, instructions="Once."
    )
    kinds = [item["type"] for item in first["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "7"}
        for item in first["output"][2:]
    ]
    agent.answer = "one"
    second = await answer(agent, stream, results, previous_response_id=first["id"])
    by_id = prompt_of(agent)
    assert second["previous_response_id"] == first["id"]
    items = [{"role": "user", "content": "hello"}, *first["output"], *results]
    await answer(agent, stream, items)
    assert prompt_of(agent) == by_id
    assert "Once." not in by_id
    assert by_id.count("<|im_start|>tool\n7") == 2
    await answer(agent, stream, "and?", previous_response_id=second["id"])
    assert prompt_of(agent).count("<|im_start|>user") == 2
    assert "<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nand?" in prompt_of(agent)


async def test_what_is_kept_can_be_read_and_deleted(agent: Rig) -> None:
    kept = await answer(agent, False)
    path = f"{PATH}/{kept['id']}"
    assert (await agent.client.get(path)).json() == kept
    assert (await agent.client.post(f"{path}/cancel")).status_code == 400
    assert (await agent.client.get(f"{path}?stream=true")).status_code == 400
    deleted = await agent.client.delete(path)
    assert deleted.json() == {"id": kept["id"], "object": "response", "deleted": True}
    for response in (
        await agent.client.get(path),
        await agent.client.delete(path),
        await agent.client.post(f"{path}/cancel"),
        await send_request(agent, previous_response_id=kept["id"]),
    ):
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["code"] == "response_not_found"
        assert f"Response with id {kept['id']!r} not found" in error["message"]
    unkept = await answer(agent, False, store=False)
    assert (await agent.client.get(f"{PATH}/{unkept['id']}")).status_code == 404
    other = await agent.client.get(f"{PATH}/resp_{'0' * 44}")
    assert "the gateway that stored it has exited" in other.json()["error"]["message"]


async def test_another_key_sees_none_of_it(rig: Any) -> None:
    await rig.start(api_keys=("one", "two"))
    mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = {"model": "stub", "input": "hello"}
    kept = (await rig.client.post(PATH, json=body, headers=mine)).json()
    path, going_on = f"{PATH}/{kept['id']}", {**body, "previous_response_id": kept["id"]}
    for response in (
        await rig.client.get(path, headers=other),
        await rig.client.delete(path, headers=other),
        await rig.client.post(f"{path}/cancel", headers=other),
        await rig.client.post(PATH, json=going_on, headers=other),
    ):
        assert response.status_code == 404, response.text
    assert (await rig.client.get(path, headers=mine)).json() == kept
    assert (await rig.client.get(path)).status_code == 401


async def test_background(rig: Any) -> None:
    await rig.start(running=False)
    response = (await send_request(rig, background=True)).json()
    assert (response["status"], response["output"]) == ("queued", [])
    path = f"{PATH}/{response['id']}"
    await rig.until(lambda: any(worker.running for worker in rig.workers))
    assert (await rig.client.get(path)).json()["status"] == "queued"
    while any(worker.running for worker in rig.workers):
        for worker in rig.workers:
            worker.step()

    ended = await outcome(rig, response["id"])
    assert ended["output"][0]["content"][0]["text"] == rig.answer
    assert (ended["status"], ended["background"]) == ("completed", True)


async def test_a_stream_in_the_background_is_taken_up_again(agent: Rig) -> None:
    """While it runs and when it has ended: the same events, with the same numbers."""
    body_fields: dict[str, Any] = {"model": "stub", "input": "hello", "background": True}
    async with client_of(agent) as client:
        received = []
        async with await client.responses.create(**body_fields, stream=True) as stream:
            async for event in stream:
                received.append(event)
                if event.type == "response.output_text.delta":
                    break
        begun = received[0]
        assert begun.type == "response.created"
        last = received[-1].sequence_number
        kept = {"response_id": begun.response.id, "stream": True}
        rest = await client.responses.retrieve(**kept, starting_after=last)
        received += [event async for event in rest]
        again = [event async for event in await client.responses.retrieve(**kept)]
        whole = await client.responses.retrieve(begun.response.id)
    assert [event.sequence_number for event in received] == list(range(len(received)))
    assert received == again
    ended = received[-1]
    assert ended.type == "response.completed"
    assert ended.response.model_dump() == whole.model_dump()
    assert whole.output_text == agent.answer


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=true", "stream"),
        ("?starting_after=3", "starting_after"),
        ("?stream=true&starting_after=-1", "starting_after"),
    ],
)
async def test_what_is_not_streamed_again_is_named(agent: Rig, query: str, param: str) -> None:
    kept = await answer(agent, True)
    response = await agent.client.get(f"{PATH}/{kept['id']}{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_stream_in_the_background_that_fails_ends(rig: Any) -> None:
    await rig.start()
    for worker in rig.workers:
        worker.rejection = "this worker is loading"
    events = events_of(await send_request(rig, background=True, stream=True))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "failed",
    ]
    path = f"{PATH}/{events[0]['response']['id']}"
    assert events_of(await rig.client.get(f"{path}?stream=true")) == events
    assert (await rig.client.get(path)).json()["status"] == "failed"


@pytest.mark.parametrize("num_steps", [0, 2])
async def test_a_stream_in_the_background_is_cancelled(rig: Any, num_steps: int) -> None:
    await rig.start(running=False)
    async with client_of(rig) as client:
        stream = await client.responses.create(
            model="stub", input="hello", background=True, stream=True
        )
        await rig.until(lambda: any(worker.running for worker in rig.workers))
        [response_id] = kept_ids(rig)
        for _ in range(num_steps):
            for worker in rig.workers:
                worker.step()
        cancelled = await client.responses.cancel(response_id)
        events = [event async for event in stream]
    assert cancelled.status == "cancelled"
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "cancelled"
    assert kinds.count("output_item.added") == kinds.count("output_item.done")


async def test_background_is_cancelled_and_counts_until_then(rig: Any, tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[one]\nkey = "one"\nmax_concurrent_requests = 1\n')
    await rig.start(running=False, api_key_file=str(keys))
    headers = {"authorization": "Bearer one"}
    body = {"model": "stub", "input": "hello", "background": True}
    begun = (await rig.client.post(PATH, json=body, headers=headers)).json()
    await rig.until(lambda: any(worker.running for worker in rig.workers))
    assert (await rig.client.post(PATH, json=body, headers=headers)).status_code == 429
    path = f"{PATH}/{begun['id']}"
    cancelled = await rig.client.post(f"{path}/cancel", headers=headers)
    assert cancelled.json()["status"] == "cancelled"
    await rig.until(lambda: any(worker.aborted for worker in rig.workers))
    again = (await rig.client.post(PATH, json=body, headers=headers)).json()
    assert (await rig.client.delete(f"{PATH}/{again['id']}", headers=headers)).status_code == 200
    assert (await rig.client.get(f"{PATH}/{again['id']}", headers=headers)).status_code == 404


async def test_a_failure_in_the_background_is_reported(rig: Any) -> None:
    await rig.start()
    for worker in rig.workers:
        worker.rejection = "this worker is loading"
    begun = (await send_request(rig, background=True)).json()
    found = await outcome(rig, begun["id"])
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")


@pytest.mark.parametrize("stream", STREAMED)
async def test_a_length_leaves_it_incomplete(agent: Rig, stream: bool) -> None:
    response = await answer(agent, stream, max_output_tokens=3)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("stream", STREAMED)
async def test_a_conversation_continues_after_a_truncated_call(agent: Rig, stream: bool) -> None:
    agent.answer = '<tool_call>{"name": "now", "arguments": {"a": 1, "b": "x y z"}}</tool_call>'
    length = len(agent.tokenizer.encode(agent.answer.partition(" y")[0]))
    cut = await answer(agent, stream, tools=TOOLS, max_output_tokens=length)
    [call] = cut["output"]
    assert (call["arguments"], call["status"]) == ('{"a":1,"b":"x', "incomplete")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
    await answer(agent, False, [output], previous_response_id=cut["id"], tools=TOOLS)
    assert '<tool_call>{"name": "now", "arguments": {"a": 1}}' in prompt_of(agent)


@pytest.mark.parametrize("stream", STREAMED)
async def test_logprobs(agent: Rig, stream: bool) -> None:
    body_fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await answer(agent, stream, **body_fields)
    [part] = response["output"][0]["content"]
    assert "".join(scored["token"] for scored in part["logprobs"]).startswith(part["text"])
    assert {len(scored["top_logprobs"]) for scored in part["logprobs"]} == {2}


async def test_tokens_are_drawn_as_in_chats(agent: Rig) -> None:
    body_fields = {
        **{"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125},
        **{"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.25},
    }
    await answer(agent, False, **body_fields, logit_bias={"7": 5})
    sampling = agent.submits()[-1].sampling
    assert {name: getattr(sampling, name) for name in body_fields} == body_fields
    assert sampling.logit_bias == {7: 5.0}


async def test_forms_choices_and_truncation(agent: Rig) -> None:
    agent.answer = "{}"
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    await answer(agent, False, text={"format": schema})
    assert json.loads(agent.submits()[-1].sampling.structured_outputs.json) == schema["schema"]
    for choice in (
        {"type": "function", "name": "now"},
        {"type": "allowed_tools", "mode": "required", "tools": [NOW]},
    ):
        await answer(agent, False, tools=TOOLS, tool_choice=choice)
        assert agent.submits()[-1].sampling.structured_outputs.structural_tag.count('"tag"') == 1
    turns = [{"role": "user", "content": f"<{i}> " + "x " * 900} for i in range(9)]
    assert (await send_request(agent, turns)).status_code == 400
    await answer(agent, False, turns, truncation="auto", instructions="Stay.")
    kept = prompt_of(agent)
    assert "Stay." in kept
    assert "<8> x" in kept
    assert "<0> x" not in kept


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input"),
        ({"tools": [{"name": "x"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]}, "tools"),
        ({"tools": [{**NOW, "surprise": 1}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"text": {"verbosity": "loud"}}, "text"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning"),
        ({"include": ["surprise"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"conversation": "x"}, "conversation"),
        ({"response_format": {}}, "response_format"),
        ({"temperature": 3000}, "temperature"),
    ],
)
async def test_what_is_wrong_is_named(agent: Rig, fields: Any, param: str) -> None:
    response = await agent.client.post(PATH, json={"model": "stub", "input": "x", **fields})
    error = response.json()["error"]
    assert response.status_code == (404 if param == "previous_response_id" else 400)
    assert error["param"] == param, error
    assert agent.submits() == []


def test_every_field_is_known() -> None:
    """Every field is supported, ignored, or rejected with an error that names it."""
    from openai.types.responses import response_create_params as create_params

    fields = set(create_params.ResponseCreateParamsStreaming.__annotations__)
    fields |= set(create_params.ResponseCreateParamsBase.__annotations__)
    served = set(ResponsesRequest.__struct_fields__)
    assert fields - served - KNOWN.ignored - set(KNOWN.unsupported) == set()
    assert not served & (KNOWN.ignored | set(KNOWN.unsupported))


async def test_fields_without_effect_have_none(agent: Rig) -> None:
    fields: dict[str, Any] = {name: {"surely": "harmless"} for name in KNOWN.ignored}
    for name, refused in KNOWN.unsupported.items():
        fields[name] = refused.harmless[0] if refused.harmless else None
    assert (await send_request(agent, **fields)).status_code == 200


def test_the_store_is_bounded_and_who_has_most_makes_room() -> None:
    store = ResponseStore("gw-7", max_bytes=10 * (OVERHEAD + 10), max_entries=8)
    kept = Stored(response=b"x" * 10, messages=b"")
    store.put("small", "a", kept)
    for number in range(20):
        store.put("large", str(number), kept)
    assert (store.num_entries, store.num_bytes) == (8, 8 * kept.num_bytes)
    assert store.get("small", "a") is kept
    store.get("large", "13")
    store.put("large", "20", kept)
    assert store.get("large", "13") is kept
    with pytest.raises(ApiError, match="or evicted"):
        store.get("large", "14")
    store.put("large", "big", Stored(response=b"x" * 10**6, messages=b""))
    assert store.num_bytes <= 10 * (OVERHEAD + 10)
    assert store.get("small", "a") is kept
    with pytest.raises(ApiError, match="does not store responses"):
        ResponseStore("gw-7", 0, 8).get("small", "a")


def test_many_small_responses_of_a_key_do_not_evict_another_key_s_large_ones() -> None:
    store = ResponseStore("gw-7", max_bytes=64 * 2**20, max_entries=64)
    for number in range(4):
        store.put("victim", str(number), Stored(response=b"", messages=b"m" * 500_000))
    for number in range(200):
        store.put("attacker", str(number), Stored(response=b"", messages=b"[]"))
    assert store.num_entries == 64
    for number in range(4):
        store.get("victim", str(number))


@given(
    puts=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40_000)), max_size=120),
    max_entries=st.integers(3, 20),
)
def test_a_key_within_its_share_of_both_limits_loses_nothing(
    puts: list[tuple[str, int]], max_entries: int
) -> None:
    max_bytes = 200_000
    store = ResponseStore("gw-7", max_bytes, max_entries)
    for number, (owner, size) in enumerate(puts):
        store.put(owner, str(number), Stored(response=b"x" * size, messages=b""))
        assert store.num_entries <= max_entries
        assert store.num_bytes <= max_bytes
    for name in "abc":
        puts_of_owner = [
            (str(n), size + OVERHEAD) for n, (owner, size) in enumerate(puts) if owner == name
        ]
        is_small = (
            len(puts_of_owner) <= max_entries // 3
            and sum(size for _, size in puts_of_owner) <= max_bytes // 3
        )
        for response_id, _ in puts_of_owner if is_small else ():
            store.get(name, response_id)


async def test_the_official_client_puts_a_stream_together(agent: Rig) -> None:
    agent.answer = f"hm\n</think>\n\n{CALLS}"
    body_fields: dict[str, Any] = {
        "model": "stub",
        "input": "hello",
        "tools": TOOLS,
        "reasoning": {"effort": "low"},
    }
    async with client_of(agent) as client:
        async with client.responses.stream(**body_fields) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        whole = await client.responses.create(**body_fields)
        read = await client.responses.retrieve(whole.id)
        await client.responses.delete(whole.id)
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    left_out = {"id", "call_id", "parsed_arguments", "parsed"}
    received = [[item.model_dump(exclude=left_out) for item in r.output] for r in (final, whole)]
    for items in received:
        for item in items:
            for part in item.get("content") or ():
                part.pop("parsed", None)
    assert received[0] == received[1]
    assert final.output_text == whole.output_text == "I look."
    assert read.model_dump() == whole.model_dump()
