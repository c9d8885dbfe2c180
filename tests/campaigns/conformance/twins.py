"""Sends requests twice with the same seed, with and without streaming; both responses must be
equal."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from tests.campaigns.conformance.cases import TIMEOUT_S, Endpoint, Outcome

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
LOGPROB_TOLERANCE = 1e-3
"""Tolerance of log-probabilities in nats. The second request finds its prompt in the cache, so
float32 sums are computed in a different order. Wrong tokens differ by far more."""
_QUESTIONS = ("What is 12 + 30?", "Reverse this list: lemon, owl", "Where is Oslo?", "Héllo 🙂!")
_FUNCTION = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
}
_NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": function} for function in (_FUNCTION, _NOW)]
_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Chur \\"1\\""}}\n</tool_call>'
_THOUGHT = "<think>\nhm, <b> & so on\n</think>\n\n"
_FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 999}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}

_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": _FORM}}

KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "plain": (CHAT, {}),
    "tools": (CHAT, {"tools": _TOOLS}),
    "required": (CHAT, {"tools": _TOOLS, "tool_choice": "required"}),
    "one call": (
        CHAT,
        {"tools": _TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "named": (
        CHAT,
        {"tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}},
    ),
    # Grammars that accept few texts, so that any model generates what parsers must handle.
    "calls of its own": (
        CHAT,
        {
            "tools": _TOOLS,
            "structured_outputs": {"choice": [_CALL, f"Well. {_CALL}", f"{_CALL}\n{_CALL}"]},
        },
    ),
    "thought": (CHAT, {"structured_outputs": {"choice": [f"{_THOUGHT}Yes.", f"{_THOUGHT}No!"]}}),
    "thought and call": (
        CHAT,
        {"tools": _TOOLS, "structured_outputs": {"choice": [_THOUGHT + _CALL, _THOUGHT + "No."]}},
    ),
    "open thought": (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}),
    "schema": (CHAT, {"response_format": _SCHEMA}),
    "completion": (COMPLETIONS, {}),
    "echo": (COMPLETIONS, {"echo": True}),
    "message": (MESSAGES, {}),
    "message with a call": (
        MESSAGES,
        {
            "tools": [{"name": "get_weather", "input_schema": _FUNCTION["parameters"]}],
            "tool_choice": {"type": "any"},
        },
    ),
}
"""Path and fields, keyed by name."""


def drawn(rng: random.Random, kind: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a random request of a kind, with random compatible options."""
    path, fields = KINDS[kind]
    body: dict[str, Any] = {"max_tokens": rng.choice((3, 40, 96)), "seed": rng.randrange(1 << 30)}
    body |= {"temperature": rng.choice((0, 0.7, 1)), **fields}
    question = rng.choice(_QUESTIONS)
    if path == COMPLETIONS:
        body["prompt"] = rng.choice((question, [question, "Once"]))
    else:
        body["messages"] = [{"role": "user", "content": question}]
    stop = rng.sample(["e", "on", "0", '"', "}\n", ", "], k=rng.choice((0, 0, 1, 3)))
    if path == MESSAGES:
        return path, body | ({"stop_sequences": stop} if stop else {})
    body["n"] = rng.choice((1, 1, 2, 3))
    body["return_token_ids"] = rng.random() < 0.5
    if stop:
        body |= {"stop": stop, "include_stop_str_in_output": rng.random() < 0.3}
    if rng.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    return path, body


def try_twins(endpoint: Endpoint, *, num_requests: int, seed: int) -> Iterator[Outcome]:
    """Sends requests of all kinds in turn; yields an outcome for each."""
    rng = random.Random(seed)
    headers = {"authorization": f"Bearer {endpoint.key}"}
    with httpx.Client(
        base_url=endpoint.base_url, headers=headers, timeout=TIMEOUT_S, trust_env=False
    ) as client:
        for number in range(num_requests):
            kind = list(KINDS)[number % len(KINDS)]
            path, body = drawn(rng, kind)
            problem = _compared(client, path, {**body, "model": endpoint.model})
            name = f"twins: {kind} {number}"
            if problem is None:
                yield Outcome(name, "passed")
            else:
                yield Outcome(name, "failed", f"{problem[:600]} of {json.dumps(body)}")


def _compared(client: httpx.Client, path: str, body: Mapping[str, Any]) -> str | None:
    """Difference between the two responses; None if they are equal."""
    options = {} if path == MESSAGES else {"stream_options": {"include_usage": True}}
    whole = client.post(path, json=body)
    stream = client.post(path, json={**body, "stream": True, **options})
    if (whole.status_code, stream.status_code) != (200, 200):
        return f"{whole.status_code} {stream.status_code}: {whole.text} {stream.text}"
    events = [
        json.loads(line[6:])
        for line in stream.text.split("\n")
        if line.startswith("data: ") and line != "data: [DONE]"
    ]
    if path == MESSAGES:
        one, other = received_message(whole.json()), gathered_message(events)
    else:
        one, other = received_choices(whole.json()), gathered_choices(events)
    return difference(one, other)


def received_choices(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Content of a non-streaming response, without ids and times, which always differ."""
    content: dict[str, Any] = {"usage": _counts(answer["usage"])}
    for choice in answer["choices"]:
        message = choice.get("message", choice)
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        content[f"choice {choice['index']}"] = {
            "text": message.get("content", message.get("text")) or "",
            "reasoning": message.get("reasoning") or "",
            "calls": [(call["name"], call["arguments"]) for call in calls],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
            "logprobs": choice.get("logprobs"),
            "token_ids": choice.get("token_ids"),
        }
    return content


def gathered_choices(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Content of a stream's chunks, combined."""
    content: dict[str, Any] = {}
    for event in events:
        if event.get("usage"):
            content["usage"] = _counts(event["usage"])
        for choice in event["choices"]:
            mine = content.setdefault(
                f"choice {choice['index']}",
                {"text": "", "reasoning": "", "calls": [], "logprobs": None, "token_ids": None},
            )
            delta = choice.get("delta", choice)
            mine["text"] += delta.get("content") or delta.get("text") or ""
            mine["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or ():
                _add_call(mine["calls"], call)
            mine["logprobs"] = _joined(mine["logprobs"], choice.get("logprobs"))
            mine["token_ids"] = _joined(mine["token_ids"], choice.get("token_ids"))
            if choice.get("finish_reason") is not None:
                mine["finish_reason"] = choice["finish_reason"]
                mine["stop_reason"] = choice["stop_reason"]
    return content


def received_message(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Content of a non-streaming response of Anthropic's API."""
    blocks = []
    for block in answer["content"]:
        kept = {k: v for k, v in block.items() if k not in ("id", "signature", "citations")}
        blocks.append(kept)
    usage = answer["usage"]
    return {
        "blocks": blocks,
        "stop": (answer["stop_reason"], answer["stop_sequence"]),
        "output_tokens": usage["output_tokens"],
    }


def gathered_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Content of the events of Anthropic's API, combined."""
    blocks: list[dict[str, Any]] = []
    content: dict[str, Any] = {"blocks": blocks}
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            dropped = ("id", "signature", "citations")
            blocks.append({k: v for k, v in event["content_block"].items() if k not in dropped})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for field in ("text", "thinking"):
                if field in delta:
                    blocks[event["index"]][field] += delta[field]
            if "partial_json" in delta:
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
        elif event["type"] == "message_delta":
            delta = event["delta"]
            content["stop"] = (delta["stop_reason"], delta["stop_sequence"])
            content["output_tokens"] = event["usage"]["output_tokens"]
    for index, text in inputs.items():
        value = _parsed(text)
        # In a non-streaming response, a call that max_tokens truncated is an object without
        # members.
        is_cut = isinstance(value, str) and content["stop"][0] == "max_tokens"
        blocks[index]["input"] = {} if is_cut else value
    return content


def difference(one: Any, other: Any, where: str = "") -> str | None:
    """Path and values of the first difference; None if there is none."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return f"{where}: {sorted(one)} whole, {sorted(other)} streamed"
        pairs = ((f"{where}.{key}", one[key], other[key]) for key in one)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{where}: {one} whole, {other} streamed"
        pairs = ((f"{where}[{i}]", *pair) for i, pair in enumerate(zip(one, other, strict=True)))
    elif isinstance(one, float) and isinstance(other, float):
        same = math.isclose(one, other, abs_tol=LOGPROB_TOLERANCE)
        return None if same else f"{where}: {one} whole, {other} streamed"
    else:
        return None if one == other else f"{where}: {one!r} whole, {other!r} streamed"
    return next((found for place, a, b in pairs if (found := difference(a, b, place))), None)


def _counts(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Token counts without cached tokens, which differ for the second request."""
    return {key: count for key, count in usage.items() if key != "prompt_tokens_details"}


def _add_call(calls: list[tuple[str, str]], delta: Mapping[str, Any]) -> None:
    function = delta["function"]
    if delta["index"] == len(calls):
        calls.append((function["name"], function["arguments"]))
    else:
        name, arguments = calls[delta["index"]]
        calls[delta["index"]] = (name, arguments + function["arguments"])


def _joined(before: Any, new: Any) -> Any:
    """Merges chunks: concatenates lists, also within objects; None counts as an empty list."""
    if before is None or new is None:
        return new if before is None else before
    if isinstance(new, Mapping):
        return {key: _joined(before[key], new[key]) for key in new}
    return before + new


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
