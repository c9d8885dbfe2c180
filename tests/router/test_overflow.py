"""Errors about prompts that exceed the context length, as coding agents detect them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.router.rig import Rig

OVERFLOWS = (
    r"(?i)prompt is too long",
    r"(?i)input is too long for requested model",
    r"(?i)exceeds the context window",
    r"(?i)input token count.*exceeds the maximum",
    r"(?i)maximum prompt length is \d+",
    r"(?i)reduce the length of the messages",
    r"(?i)maximum context length is \d+ tokens",
    r"(?i)exceeds the limit of \d+",
    r"(?i)exceeds the available context size",
    r"(?i)greater than the context length",
    r"(?i)context window exceeds limit",
    r"(?i)exceeded model token limit",
    r"(?i)context[_ ]length[_ ]exceeded",
)
"""Patterns of OpenCode and pi, of which one must match."""
LITELLM = "This model's maximum context length is"
"""Part of the message by which litellm, and so aider, detects an overflow."""
CLAUDE_CODE = re.compile(r"(?i)prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)")
"""Claude Code reads both numbers, and compacts by their difference."""
LONG = "hello world " * 6000
VERY_LONG = "hello " * 200_000
"""Rejected by its number of characters, before it is tokenized."""


def is_overflow(message: str) -> bool:
    return any(re.search(pattern, message) for pattern in OVERFLOWS)


@pytest.mark.parametrize("text", [LONG, VERY_LONG], ids=["tokens", "characters"])
async def test_openai_clients_detect_an_overflow(agent: Rig, text: str) -> None:
    for path, field in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/responses", {"input": text}),
    ):
        response = await agent.client.post(path, json={"model": "stub", **field})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["type"] == "invalid_request_error"
        assert error["param"] == next(iter(field))
        assert is_overflow(error["message"])
        assert error["message"].startswith(LITELLM)
    assert agent.submits() == []


@pytest.mark.parametrize("text", [LONG, VERY_LONG], ids=["tokens", "characters"])
async def test_claude_code_reads_the_numbers_of_an_overflow(agent: Rig, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "stream": True}
    response = await agent.client.post("/v1/messages", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    found = CLAUDE_CODE.search(error["message"])
    assert found is not None
    num_tokens, maximum = map(int, found.groups())
    assert num_tokens > maximum == 4095


async def test_a_prompt_of_the_maximum_is_no_overflow(agent: Rig) -> None:
    """The maximum in the error is the longest prompt that is accepted."""
    for number, status in ((4095, 200), (4096, 400)):
        response = await agent.complete([5] * number, max_tokens=1)
        assert response.status_code == status


async def test_streamed_responses_report_an_overflow_in_the_stream(
    agent: Rig,
) -> None:
    """Codex only detects it there, and OpenCode in the event `error` before."""
    body = {"model": "stub", "input": LONG, "stream": True, "store": False}
    response = await agent.client.post("/v1/responses", json=body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    made = stream_of(response.text)
    assert [event["type"] for event in made] == [
        "response.created",
        "response.in_progress",
        "error",
        "response.failed",
    ]
    assert [event["sequence_number"] for event in made] == [0, 1, 2, 3]
    assert made[2]["error"]["code"] == "context_length_exceeded"
    failed = made[3]["response"]
    assert (failed["status"], failed["output"]) == ("failed", [])
    assert failed["error"]["code"] == "context_length_exceeded"
    assert is_overflow(failed["error"]["message"])
    assert agent.submits() == []


def stream_of(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream."""
    lines = [line for part in text.split("\n\n") for line in part.split("\n")]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
