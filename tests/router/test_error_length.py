"""Errors quote only a bounded part of what clients send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from router.api.openai.protocol import ChatRequest, CompletionRequest
from router.api.responses.protocol import ResponsesRequest
from tests.support.router.rig import Rig

HUGE = "x" * 5000
MAX_ERROR_BYTES = 2048
BODIES: dict[str, tuple[dict[str, Any], type]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "hi"}]}, ChatRequest),
    "/v1/completions": ({"prompt": "hi"}, CompletionRequest),
    "/v1/responses": ({"input": "hi"}, ResponsesRequest),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
        ChatRequest,
    ),
}
CASES = [
    (path, name)
    for path, (_, kind) in BODIES.items()
    for name in (*kind.__struct_fields__, HUGE, "system", "metadata", "thinking")
]


@pytest.mark.parametrize("path", BODIES)
async def test_a_huge_value_in_any_field_makes_no_huge_error(rig: Rig, path: str) -> None:
    await rig.start()
    num_errors = 0
    for name in dict.fromkeys(name for of, name in CASES if of == path):
        for value in (HUGE, [HUGE], {HUGE: HUGE}, {"type": HUGE}, [{"type": HUGE, "role": HUGE}]):
            body = {"model": "stub", **BODIES[path][0], name: value}
            response = await rig.client.post(path, json=body)
            if response.status_code != 200:
                num_errors += 1
                assert len(response.content) <= MAX_ERROR_BYTES, (name[:40], response.text[:80])
    assert num_errors > 10


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "format": "date", "pattern": "a+"}},
    "required": ["a"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
FUNCTION = {"name": "add", "description": "adds", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
SAMPLING: dict[str, Any] = {
    "stop": ["a"],
    "logit_bias": {"5": 1},
    "bad_words": ["b"],
    "stream_options": {"include_usage": True},
    "stream": True,
}
NESTED: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            **SAMPLING,
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "1"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "chat_template_kwargs": {"enable_thinking": False},
            "documents": [{"text": "d"}],
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [USER],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
            },
        },
    ),
    ("/v1/chat/completions", {"messages": [USER], "tool_choice": "auto", "slo": {"ttft_ms": 5}}),
    ("/v1/completions", {**SAMPLING, "prompt": ["a"], "structured_outputs": {"json": SCHEMA}}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "a+"}}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"choice": ["a"]}}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"grammar": 'root ::= "a"'}}),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "a"}],
                },
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "add"},
            "reasoning": {"effort": "low"},
            "include": ["reasoning.encrypted_content"],
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/responses",
        {
            "input": "a",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "previous_response_id": "resp_0",
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 4,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": "c", "name": "add", "input": {"a": "b"}}
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}],
                },
            ],
            "tools": [{"name": "add", "description": "adds", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "add"},
            "stop_sequences": ["a"],
            "thinking": {"type": "disabled"},
            "metadata": {"user_id": "u"},
        },
    ),
]


def with_huge(value: Any) -> Iterator[Any]:
    """Copies of a JSON value, each with one value or key replaced by something huge."""
    if isinstance(value, dict):
        for key, item in value.items():
            for changed in with_huge(item):
                yield {**value, key: changed}
            yield {(HUGE if name == key else name): member for name, member in value.items()}
    elif isinstance(value, list):
        for i, item in enumerate(value):
            for changed in with_huge(item):
                yield [*value[:i], changed, *value[i + 1 :]]
    else:
        yield from (HUGE, [HUGE], {HUGE: HUGE})


@pytest.mark.parametrize(("path", "fields"), NESTED)
async def test_a_huge_nested_value_makes_no_huge_error(
    agent: Rig, path: str, fields: dict[str, Any]
) -> None:
    num_errors = 0
    for changed in with_huge(fields):
        response = await agent.client.post(path, json={**changed, "model": "stub"})
        if response.status_code != 200:
            num_errors += 1
            assert len(response.content) <= MAX_ERROR_BYTES, response.text[:200]
    assert num_errors > 5


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/{HUGE}"),
        ("GET", f"/v1/models/{HUGE}"),
        ("GET", f"/v1/responses/{HUGE}"),
        ("GET", f"/v1/responses/resp_0?starting_after={HUGE}&stream=true"),
        ("DELETE", f"/v1/responses/{HUGE}"),
    ],
    ids=["route", "model", "response", "query", "delete"],
)
async def test_a_huge_path_makes_no_huge_error(rig: Rig, method: str, path: str) -> None:
    await rig.start()
    # Beyond 64 KiB the client itself rejects a URL.
    response = await rig.client.request(method, path.replace(HUGE, "y" * 60_000))
    assert response.status_code >= 400
    assert len(response.content) <= MAX_ERROR_BYTES
