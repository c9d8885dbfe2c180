"""Fixed list of requests, each of which has a single correct answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

MODEL: Final = "chaos"
DIFFUSION: Final = "chaos-diffusion"
_VARIANTS = 3
"""Number of requests per kind, with different prompts."""
_SHORTER = 16
"""Number of tokens by which a variant's answer is shorter than that of the previous variant."""
_MIN_TOKENS = 32
"""Minimum tokens of answers with penalties."""
LEAST_OUTPUT_LEN: Final = _MIN_TOKENS + _SHORTER * (_VARIANTS - 1)
"""Minimum `output_len`: the last variant's answers still have `_MIN_TOKENS`."""
_LONG = (
    "The harbour opens at dawn; the ferry leaves at seven, and the baker is up before both. " * 12
)
_ROWS = {
    "type": "array",
    "minItems": 40,
    "maxItems": 60,
    "items": {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 999},
            "word": {"enum": ["boat", "bread", "bell", "tower"]},
        },
        "required": ["n", "word"],
        "additionalProperties": False,
    },
}
_SCHEMA = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "rows", "schema": _ROWS}}
}
_SAMPLED = {"temperature": 1.0, "top_p": 0.95}
_EVERYWHERE: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "sampled": _SAMPLED,
    "schema": {"chat": True, **_SCHEMA},
    "several": {**_SAMPLED, "n": 2},
    "stop": {**_SAMPLED, "stop": ["42", "er t", "bell"]},
    "whole": {"stream": False},
}
_OF_TOKENS: Mapping[str, Mapping[str, Any]] = {
    "chat": {"chat": True, **_SAMPLED},
    "logprobs": {"logprobs": 3},
    "penalties": {
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "min_tokens": _MIN_TOKENS,
    },
    "regex": {"structured_outputs": {"regex": "([a-z]{2,9} ){60,90}"}, **_SAMPLED},
    "whole-several": {**_SAMPLED, "n": 3, "logprobs": 1, "stream": False},
    "long-prompt": {**_SAMPLED, "long": True},
}
"""Options that a block-diffusion model rejects or that do not affect it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """A request ready to be sent."""

    index: int
    kind: str
    path: str
    body: bytes
    """Body in JSON."""
    stream: bool


def list_requests(output_len: int, *, diffusion: bool = False) -> tuple[PlannedRequest, ...]:
    """All requests for all served models, alternating between kinds.

    Args:
        output_len: tokens of the first variant's answers, at least `LEAST_OUTPUT_LEN`.
        diffusion: whether a block-diffusion model is also served.
    """
    mixes = [(MODEL, {**_EVERYWHERE, **_OF_TOKENS})]
    if diffusion:
        mixes.append((DIFFUSION, dict(_EVERYWHERE)))
    bodies = (
        (kind, fields, _body(model, fields, variant, output_len))
        for variant in range(_VARIANTS)
        for model, kinds in mixes
        for kind, fields in kinds.items()
    )
    return tuple(_requests(bodies))


def filling_request(number: int) -> PlannedRequest:
    """A request with a prompt of a few thousand tokens that shares no block with others, and a very
    short answer."""
    fields = {"max_tokens": 1, "stream": False, "prompt": f"{number}: {_LONG * 4}"}
    body = {"model": MODEL, "temperature": 0.0, **fields}
    return PlannedRequest(
        index=number,
        kind="fill",
        path="/v1/completions",
        body=json.dumps(body).encode(),
        stream=False,
    )


def _requests(
    bodies: Iterator[tuple[str, Mapping[str, Any], dict[str, Any]]],
) -> Iterator[PlannedRequest]:
    for index, (kind, fields, body) in enumerate(bodies):
        yield PlannedRequest(
            index=index,
            kind=kind,
            path="/v1/chat/completions" if fields.get("chat") else "/v1/completions",
            body=json.dumps(body).encode(),
            stream=body["stream"],
        )


def _body(model: str, fields: Mapping[str, Any], variant: int, output_len: int) -> dict[str, Any]:
    own = {name: value for name, value in fields.items() if name not in ("chat", "long")}
    prompt = f"{variant}: what do the people of the town do all day?"
    if fields.get("long"):
        prompt = f"{variant}: {_LONG}"
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": output_len - _SHORTER * variant,
        "temperature": 0.0,
        "seed": 1000 + variant,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **own,
    }
    if fields.get("chat"):
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return body
