"""Invalid bodies of about twenty kinds that a server must reject."""

from __future__ import annotations

import json
from typing import Any

from tests.campaigns.chaos.planned_requests import MODEL, PlannedRequest

_DEEP = 50_000
_CHAT = "/v1/chat/completions"
_PLAIN = "/v1/completions"


def hostile_requests() -> tuple[PlannedRequest, ...]:
    """One request of each kind; its index is its position."""
    return tuple(
        PlannedRequest(index=index, kind=kind, path=path, body=body, stream=False)
        for index, (kind, path, body) in enumerate(_kinds())
    )


def _kinds() -> list[tuple[str, str, bytes]]:
    many_messages = [{"role": "user", "content": "x"}] * 200_000
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#/nowhere"}}}
    return [
        ("empty", _PLAIN, b""),
        ("no-json", _PLAIN, b'{"model": "chaos", "prompt": '),
        ("not-utf-8", _PLAIN, b'{"model": "chaos", "prompt": "\xff\xfe"}'),
        ("list", _PLAIN, b"[1, 2, 3]"),
        ("nested", _PLAIN, b'{"prompt": ' + b"[" * _DEEP + b"]" * _DEEP + b"}"),
        ("other-model", _PLAIN, _body(model="none-such")),
        ("no-prompt", _PLAIN, _body(prompt=None)),
        ("prompt-of-floats", _PLAIN, _body(prompt=[1.5, 2.5])),
        ("ids-out-of-range", _PLAIN, _body(prompt=[10**9])),
        ("too-long", _PLAIN, _body(prompt="the ferry and the town " * 40_000)),
        ("negative-length", _PLAIN, _body(max_tokens=-1)),
        ("many-choices", _PLAIN, _body(n=10**9)),
        ("hot", _PLAIN, _body(temperature=1e308)),
        ("many-stops", _PLAIN, _body(stop=["x"] * 100_000)),
        ("many-biases", _PLAIN, _body(logit_bias={str(i): 1.0 for i in range(100_000)})),
        ("many-allowed", _PLAIN, _body(allowed_token_ids=list(range(400_000)))),
        ("many-logprobs", _PLAIN, _body(logprobs=10**6)),
        ("broken-regex", _PLAIN, _body(structured_outputs={"regex": "(" * 2_000})),
        (
            "heavy-regex",
            _PLAIN,
            _body(structured_outputs={"regex": "(((a{1,999}){1,999}){1,999})"}),
        ),
        (
            "broken-schema",
            _CHAT,
            _body(prompt=None, messages=_one_message(), response_format=schema),
        ),
        ("many-messages", _CHAT, _body(prompt=None, messages=many_messages)),
        ("other-role", _CHAT, _body(prompt=None, messages=[{"role": "king", "content": "x"}])),
    ]


def _one_message() -> list[dict[str, str]]:
    return [{"role": "user", "content": "x"}]


def _body(**fields: Any) -> bytes:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 4, **fields}
    return json.dumps({name: value for name, value in body.items() if value is not None}).encode()
