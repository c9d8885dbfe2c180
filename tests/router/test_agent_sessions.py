"""Long sessions of coding agents: images, cut calls and overflows never end them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.effort import cases
from tests.support.router.agent import events_of, play
from tests.support.router.agent_clients import CLAUDE_HISTORY, CLIENTS, DATA_URL
from tests.support.router.rig import Rig

History = list[Any]
_CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
ANSWERS = {
    "weather": "I look.\n" + _CALL % ("get_weather", '{"city": "Bern"}'),
    "two": _CALL % ("get_weather", '{"city": "Bern"}') + _CALL % ("get_weather", "{}"),
    "broken": _CALL % ("get_weather", '{"city": "Be}'),
    "unknown": _CALL % ("rm", '{"path": "/"}'),
    "patch": _CALL % ("apply_patch", '{"input": "*** Begin Patch\\n*** End Patch"}'),
    "text": "Done. " * 40,
    "empty": "",
}
OUTPUT = "sunny in the hills " * 40
_SHORT = 66
"""Maximum tokens of an answer that is cut within the arguments of its call, with or without a
thought before it."""


class ChatSession:
    """Client of /v1/chat/completions."""

    field, maximum = "messages", "max_tokens"

    def first(self, text: str) -> History:
        return [{"role": "system", "content": "Be brief."}, *self.said(text)]

    def said(self, text: str) -> History:
        return [{"role": "user", "content": text}]

    def image(self) -> History:
        image = {"type": "image_url", "image_url": {"url": DATA_URL}}
        return [{"role": "user", "content": [{"type": "text", "text": "look"}, image]}]

    def answered(self, response: httpx.Response) -> History:
        message = _chat_message(response)
        calls = message.get("tool_calls") or ()
        return [message] + [
            {"role": "tool", "tool_call_id": call["id"], "content": OUTPUT} for call in calls
        ]


class ResponsesSession:
    """Client of /v1/responses."""

    field, maximum = "input", "max_output_tokens"

    def first(self, text: str) -> History:
        content = [{"type": "input_text", "text": "<permissions>"}]
        return [{"type": "message", "role": "developer", "content": content}, *self.said(text)]

    def said(self, text: str) -> History:
        content = [{"type": "input_text", "text": text}]
        return [{"type": "message", "role": "user", "content": content}]

    def image(self) -> History:
        content = [{"type": "input_image", "image_url": DATA_URL}]
        compaction = {"type": "compaction", "encrypted_content": "x"}
        return [{"type": "message", "role": "user", "content": content}, compaction]

    def answered(self, response: httpx.Response) -> History:
        is_stream = response.headers["content-type"].startswith("text/event-stream")
        made = events_of(response)[-1]["response"] if is_stream else response.json()
        history = list(made["output"])
        for item in made["output"]:
            if "call_id" in item:
                kind = f"{item['type']}_output"
                history.append({"type": kind, "call_id": item["call_id"], "output": OUTPUT})
        return history


class MessagesSession:
    """Client of /v1/messages."""

    field, maximum = "messages", "max_tokens"

    def first(self, text: str) -> History:
        return self.said(text)

    def said(self, text: str) -> History:
        return [{"role": "user", "content": text}]

    def image(self) -> History:
        return list(CLAUDE_HISTORY[:1])

    def answered(self, response: httpx.Response) -> History:
        content = _blocks(response)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": OUTPUT}
            for block in content
            if block["type"] == "tool_use"
        ]
        answer = {"role": "assistant", "content": content}
        return [answer, {"role": "user", "content": results or OUTPUT}]


def _chat_message(response: httpx.Response) -> dict[str, Any]:
    """The answer as clients keep it, from a stream or a whole response."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return dict(response.json()["choices"][0]["message"])
    deltas = [c["delta"] for event in events_of(response) for c in event["choices"]]
    calls: dict[int, dict[str, Any]] = {}
    for part in (call for delta in deltas for call in delta.get("tool_calls") or ()):
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = calls.setdefault(part["index"], empty)
        call["id"] = part.get("id") or call["id"]
        for name, text in part["function"].items():
            call["function"][name] += text or ""
    message: dict[str, Any] = {"role": "assistant"}
    for name in ("content", "reasoning_content"):
        message[name] = "".join(delta.get(name) or "" for delta in deltas) or None
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def _blocks(response: httpx.Response) -> list[dict[str, Any]]:
    """Content blocks of a message, from a stream or a whole response."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return list(response.json()["content"])
    blocks: list[dict[str, Any]] = []
    for event in events_of(response):
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for field, key in (
                ("text", "text"),
                ("thinking", "thinking"),
                ("partial_json", "json"),
            ):
                blocks[-1][key] = blocks[-1].get(key, "") + delta.get(field, "")
    for block in blocks:
        given = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = _parsed(given)
    return blocks


def _parsed(given: str) -> Any:
    """Arguments as Claude Code keeps them: an object, or the text of a call that was cut off."""
    try:
        return json.loads(given or "{}")
    except ValueError:
        return given


def session_of(path: str) -> ChatSession | ResponsesSession | MessagesSession:
    if "chat" in path:
        return ChatSession()
    return ResponsesSession() if "responses" in path else MessagesSession()


def is_overflow(response: httpx.Response) -> bool:
    """Whether it is the error after which clients compact, as status or in the stream."""
    text = response.text
    found = "maximum context length" in text or "prompt is too long" in text
    if response.status_code == 400:
        assert found, text
    return found


def newer_half(history: History) -> History:
    """The newer half, from a result on whose call is lost."""
    half = len(history) // 2
    marks = ('"role": "tool"', '_output"', '"tool_result"')
    results = (
        place
        for place in range(half, len(history))
        if any(mark in json.dumps(history[place]) for mark in marks)
    )
    return history[next(results, half) :]


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_long_session_never_ends(agent: Rig, name: str) -> None:
    """Requests are all answered, except that a full context is an error after which the client
    compacts: it drops the older half, with the calls of results that it keeps, or summarizes."""
    client, session = CLIENTS[name], session_of(CLIENTS[name].path)
    answers = [ANSWERS["text"], ANSWERS["empty"]]
    if "tools" in client.body:
        answers = list(ANSWERS.values())
    maximum = next((name for name in client.body if name.startswith("max_")), session.maximum)
    history = session.first("read the files; " * 200)
    num_overflows, was_overflow = 0, False
    for number in range(cases(100, 6)):
        is_cut = number % 5 == 0
        play(agent, answers[0 if is_cut else number % len(answers)])
        if number % 3 == 0:
            history += session.image()
        body = {**client.body, session.field: history, "stream": number % 2 == 0}
        if is_cut:
            body[maximum] = _SHORT
        response = await agent.client.post(client.path, json=body, headers=dict(client.headers))
        if is_overflow(response):
            assert not was_overflow, "compaction must help"
            num_overflows, was_overflow = num_overflows + 1, True
            kept = newer_half(history) if num_overflows % 2 else []
            history = session.first("Summary: read.") + kept
            continue
        was_overflow = False
        assert response.status_code == 200, response.text
        answer = session.answered(response)
        if is_cut:
            assert '"length"' in response.text or '"max_' in response.text
            assert "tools" not in client.body or "get_weather" in json.dumps(answer)
        history += answer
        if "tools" not in client.body:
            history += session.said(OUTPUT)
    assert num_overflows
