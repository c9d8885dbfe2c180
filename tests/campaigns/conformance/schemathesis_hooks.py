"""Hooks that Schemathesis loads with `SCHEMATHESIS_HOOKS`. They make requests valid for the served
models, and short.

Random bodies would rarely name a served model, and those that did could generate texts of any
length. Values that the document allows are replaced with other allowed values, so that valid
requests stay valid and invalid requests stay invalid.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import schemathesis

MAX_TOKENS = 8
MAX_CHOICES = 2
_MAX_ALLOWED_CHOICES = 128
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_LENGTH_OF = {
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""Field that limits the length of the answer, by route."""
_CONVERSATION = [{"role": "user", "content": "What is 12 + 30?"}]


def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Changes a case before it is sent: three of four get the model's name, and every second one is
    a chat."""
    body = case.body
    if not isinstance(body, dict):
        return
    lot = zlib.crc32(json.dumps(body, sort_keys=True, default=repr).encode())
    if isinstance(body.get("model"), str) and lot % 4:
        body["model"] = os.environ["CONFORMANCE_MODEL"]
    if lot % 2 and _is_conversation(body.get("messages")):
        body["messages"] = _CONVERSATION
    for name in _LENGTHS:
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            body[name] = min(value, MAX_TOKENS)
    length = _LENGTH_OF.get(case.operation.path)
    if length is not None and all(body.get(name) is None for name in _LENGTHS):
        body[length] = MAX_TOKENS
    choices = body.get("n")
    if type(choices) is int and MAX_CHOICES < choices <= _MAX_ALLOWED_CHOICES:
        body["n"] = MAX_CHOICES


def _is_conversation(messages: Any) -> bool:
    return isinstance(messages, list) and all(isinstance(one, dict) for one in messages)


schemathesis.hook(before_call)
