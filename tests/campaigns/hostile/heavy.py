"""Bodies at every limit: the largest that are accepted, and small ones that request the maximum
amount of work."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.api.http.body import MAX_BODY_BYTES
from router.api.openai.params import MAX_COMPLETIONS, MAX_ENTRIES, MAX_STOP_CHARACTERS
from router.api.openai.protocol import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from router.api.openai.values import CONTAINER, MAX_VALUES, MEMBER
from tests.campaigns.hostile.inputs import CHAT, MAX_MODEL_LEN, TEXT, VOCABULARY
from worker.protocol.sampling import MAX_LOGIT_BIASES
from worker.protocol.structured import MAX_GRAMMAR_BYTES

_ROOM = 1024
"""Number of bytes, and number of values, reserved for a body's other fields."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeavyCase:
    """A heavy body."""

    name: str
    path: str
    make: Callable[[str], bytes]
    """Creates the body on demand, given a model name."""
    is_wide: bool = False
    """Whether the body requests many short completions."""
    is_form: bool = False
    """Whether the body has a grammar; workers cache valid grammars."""


def heavy_cases() -> list[HeavyCase]:
    """All heavy bodies."""
    cases = [
        *(HeavyCase(name=name, path=path, make=make) for name, path, make in _filled()),
        *(HeavyCase(name=name, path=path, make=make) for name, path, make in _counted()),
        *(
            HeavyCase(name=name, path=TEXT, make=_json(body), is_wide=True)
            for name, body in _parameters().items()
        ),
        *(
            HeavyCase(name=name, path=TEXT, make=_json(body), is_form=True)
            for name, body in _forms().items()
        ),
    ]
    assert len({case.name for case in cases}) == len(cases)
    return cases


def _json(body: Callable[[], dict[str, Any]]) -> Callable[[str], bytes]:
    return lambda model: json.dumps({"model": model, "max_tokens": 4, **body()}).encode()


_Made = tuple[str, str, Callable[[str], bytes]]
_PROMPT = '"prompt":"hi",'
_TEXT = '"messages":[{"role":"user","content":"hi"}],'


def _fill(begin: str, unit: str, end: str) -> Callable[[str], bytes]:
    """Function that creates a body of the maximum size by repeating `unit`; `end` follows the last
    one."""

    def make(model: str) -> bytes:
        before = f'{{"model":{json.dumps(model)},{begin}'.encode()
        part = unit.encode()
        count = (MAX_BODY_BYTES - _ROOM - len(before)) // len(part)
        return before + part * count + f"{end}}}".encode()

    return make


def _filled() -> list[_Made]:
    """Bodies with 32 MiB in one field; most of them are rejected, each by a different check."""
    user = '{"role":"user"},'
    part = '{"type":"text","text":""},'
    return [
        ("32 MiB of messages", CHAT, _fill('"messages":[', user, user[:-1] + "]")),
        ("32 MiB of parts", CHAT, _fill(f"{_TEXT[:-7]}[", part, part[:-1] + "]}]")),
        ("32 MiB of content", CHAT, _fill(_TEXT[:-6], "hi ", '"}]')),
        ("32 MiB in a message's name", CHAT, _fill(f'{_TEXT[:-3]},"name":"', "hi ", '"}]')),
        (
            "32 MiB for the template",
            CHAT,
            _fill(f'{_TEXT}"chat_template_kwargs":{{"x":"', "a", '"}'),
        ),
        ("32 MiB of role", CHAT, _fill('"messages":[{"role":"', "a", '"}]')),
        ("32 MiB of token ids", TEXT, _fill('"prompt":[', "7,", "7]")),
        ("32 MiB of words", TEXT, _fill('"prompt":"', "word ", '"')),
        ("32 MiB of one letter", TEXT, _fill('"prompt":"', "a", '"')),
        ("32 MiB of emoji", TEXT, _fill('"prompt":"', "🙂", '"')),
        ("32 MiB of escapes", TEXT, _fill('"prompt":"', "\\u0041", '"')),
        ("32 MiB of backslashes", TEXT, _fill(_PROMPT + '"user":"', "\\\\", '"')),
        ("32 MiB of quotes", TEXT, _fill(_PROMPT + '"user":"', '\\"', '"')),
        ("32 MiB of prompts", TEXT, _fill('"prompt":[', '"a",', '"a"]')),
        ("32 MiB of empty lists", TEXT, _fill('"prompt":[', "[],", "[]]")),
        ("32 MiB of depth", TEXT, _fill('"prompt":', "[", "")),
        ("32 MiB of digits", TEXT, _fill(_PROMPT + '"seed":', "7", "")),
        ("32 MiB of white space", TEXT, _fill(_PROMPT, " ", '"max_tokens":1')),
        ("32 MiB of stop", TEXT, _fill(_PROMPT + '"stop":"', "a", '"')),
        ("32 MiB of stops", TEXT, _fill(_PROMPT + '"stop":[', '"a",', '"a"]')),
        ("32 MiB of bad words", TEXT, _fill(_PROMPT + '"bad_words":[', '"a",', '"a"]')),
        ("32 MiB of biases", TEXT, _fill(_PROMPT + '"logit_bias":{', '"1":1,', '"1":1}')),
        ("32 MiB of allowed ids", TEXT, _fill(_PROMPT + '"allowed_token_ids":[', "1,", "1]")),
        ("32 MiB of cache salt", TEXT, _fill(_PROMPT + '"cache_salt":"', "a", '"')),
        ("32 MiB of model name", TEXT, _fill('"prompt":"hi","model":"', "a", '"')),
        ("32 MiB that are ignored", TEXT, _fill(_PROMPT + '"metadata":"', "a", '"')),
        ("32 MiB of regex", TEXT, _fill(_PROMPT + '"structured_outputs":{"regex":"', "a?", '"}')),
        (
            "32 MiB of choices",
            TEXT,
            _fill(_PROMPT + '"structured_outputs":{"choice":[', '"a",', '"a"]}'),
        ),
        ("32 MiB of no UTF-8", TEXT, lambda model: b'{"prompt":"' + b"\xff" * (31 << 20) + b'"}'),
    ]


def _count(begin: str, unit: str, end: str) -> Callable[[str], bytes]:
    """Function that creates a body with the maximum number of values, most of them in copies of
    `unit`."""
    cost = unit.count(",") + MEMBER * unit.count(":") + CONTAINER * sum(map(unit.count, "[{"))

    def make(model: str) -> bytes:
        before = f'{{"model":{json.dumps(model)},{begin}'
        count = (MAX_VALUES - _ROOM) // cost
        return f"{before}{unit * count}{end}}}".encode()

    return make


def _counted() -> list[_Made]:
    """Bodies with the maximum number of values, so that all of them are decoded and validated."""
    user, part = '{"role":"user","content":"a"},', '{"type":"text","text":"a"},'
    return [
        ("most messages", CHAT, _count('"messages":[', user, user[:-1] + "]")),
        ("most parts", CHAT, _count(f"{_TEXT[:-7]}[", part, part[:-1] + "]}]")),
        ("most token ids", TEXT, _count('"prompt":[', "7,", "7]")),
        ("most large token ids", TEXT, _count('"prompt":[', "70007,", "7]")),
        ("most allowed ids", TEXT, _count(_PROMPT + '"allowed_token_ids":[', "7,", "7]")),
        ("most stop tokens", TEXT, _count(_PROMPT + '"stop_token_ids":[', "7,", "7]")),
        ("most stops", TEXT, _count(_PROMPT + '"stop":[', '"a",', '"a"]')),
        ("most biases", TEXT, _count(_PROMPT + '"logit_bias":{', '"1":1,', '"1":1}')),
        ("most prompts", TEXT, _count('"prompt":[', '"a",', '"a"]')),
        ("most lists of ids", TEXT, _count('"prompt":[', "[7],", "[7]]")),
        ("most that are ignored", TEXT, _count(_PROMPT + '"metadata":[', '{"a":1},', "{}]")),
        (
            "most for the template",
            CHAT,
            _count(_TEXT + '"chat_template_kwargs":{"x":[', "[1],", "[]]}"),
        ),
    ]


def _parameters() -> dict[str, Callable[[], dict[str, Any]]]:
    """Small bodies that cause a lot of work: many completions, with state for each."""
    all_ids = list(range(VOCABULARY))
    stops = [f"{i:03}".ljust(MAX_STOP_CHARACTERS // MAX_STOP_STRINGS, "x") for i in range(128)]
    long_prompt = [7] * (MAX_MODEL_LEN - 2)
    prompts = [f"{i} hi" for i in range(MAX_COMPLETIONS // MAX_CHOICES)]

    def widest(num_entries: int) -> dict[str, Any]:
        """The maximum number of completions for parameters with this number of entries."""
        number = min(MAX_ENTRIES // num_entries, MAX_COMPLETIONS)
        n = min(number, MAX_CHOICES)
        return {"n": n, "prompt": prompts[: number // n]}

    every: dict[str, Any] = {
        "stop": stops,
        "stop_token_ids": all_ids[-MAX_STOP_TOKENS:],
        "logit_bias": {str(i): 1.0 for i in range(MAX_LOGIT_BIASES)},
        "bad_words": [f"w{i}" for i in range(MAX_BAD_WORDS)],
    }
    return {
        "n 128 of 16 prompts": lambda: {"n": MAX_CHOICES, "prompt": prompts},
        "n 128 of 16 prompts, streamed": lambda: {"n": 128, "prompt": prompts, "stream": True},
        "n 128 of 16 prompts, likeliest": lambda: {
            **{"n": MAX_CHOICES, "prompt": prompts, "logprobs": 20, "echo": True}
        },
        "2048 prompts": lambda: {"prompt": [f"{i} hi" for i in range(MAX_COMPLETIONS)]},
        "16 long prompts": lambda: {"prompt": [long_prompt] * 16, "max_tokens": 1},
        "500 long prompts": lambda: {"prompt": [long_prompt] * 500, "max_tokens": 1},
        "allowed ids": lambda: {**widest(VOCABULARY), "allowed_token_ids": all_ids},
        "stops": lambda: {**widest(MAX_STOP_STRINGS), "stop": stops},
        "one long stop": lambda: {**widest(1), "stop": "x" * MAX_STOP_CHARACTERS},
        "stop tokens": lambda: {
            **widest(MAX_STOP_TOKENS),
            "stop_token_ids": every["stop_token_ids"],
        },
        "biases": lambda: {**widest(MAX_LOGIT_BIASES), "logit_bias": every["logit_bias"]},
        "bad words": lambda: {**widest(MAX_BAD_WORDS), "bad_words": every["bad_words"]},
        "all parameters": lambda: {**widest(sum(map(len, every.values()))), **every},
        "prompt logprobs": lambda: {"prompt": long_prompt, "prompt_logprobs": 20, "max_tokens": 1},
        "prompt logprobs, n 8": lambda: {
            **{"prompt": long_prompt, "prompt_logprobs": 20, "max_tokens": 1, "n": 8}
        },
        "prompt logprobs, n 128": lambda: {
            **{"prompt": long_prompt, "prompt_logprobs": 20, "max_tokens": 1, "n": 128}
        },
        "echo with logprobs, n 128": lambda: {
            **{"prompt": long_prompt, "echo": True, "logprobs": 20, "max_tokens": 1, "n": 128}
        },
        "as many characters as tokenized": lambda: {"prompt": "a b " * (4 * MAX_MODEL_LEN)},
    }


def _forms() -> dict[str, Callable[[], dict[str, Any]]]:
    """Grammars with the maximum size, and with the maximum depth."""
    size = MAX_GRAMMAR_BYTES - _ROOM

    def form(**kind: Any) -> Callable[[], dict[str, Any]]:
        return lambda: {"prompt": "hi", "structured_outputs": kind}

    def nested(depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(depth):
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        return schema

    wide = {f"p{i}": {"type": "string", "maxLength": i} for i in range(size // 50)}
    return {
        "1 MiB of regex": form(regex="(ab|c)" * (size // 6)),
        "1 MiB of open brackets": form(regex="(" * size),
        "1 MiB of choices": form(choice=[f"{i:05}" for i in range(size // 9)]),
        "1 MiB of rules": form(grammar='root ::= "a"\n' + 'r ::= "a" | r\n' * (size // 16)),
        "1 MiB of alternatives": form(grammar="root ::= " + '"a" | ' * (size // 6) + '"b"'),
        "1 MiB of Lark": form(
            grammar='start: "a"\n' + "".join(f"r{i}: r{i}\n" for i in range(9**5))
        ),
        "1 MiB of schema": form(json={"type": "object", "properties": wide}),
        "1 MiB of enum": form(json={"enum": [f"{i:05}" for i in range(size // 10)]}),
        "deep schema": form(json=nested(300)),
        "deeper schema": lambda: {
            "prompt": "hi",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": nested(320)},
            },
        },
        "schema as deep text": form(json='{"not":' * (size // 8) + "{}" + "}" * (size // 8)),
        "large repetition": form(regex="((a{1,1000}){1,1000}){1,1000}"),
        "large bounds": form(
            json={"type": "array", "maxItems": 10**6, "items": {"maxLength": 10**6}}
        ),
        "1 MiB of tags": form(
            structural_tag={
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<"],
                    "tags": [
                        {"begin": f"<{i}>", "content": {"type": "any_text"}, "end": f"</{i}>"}
                        for i in range(size // 90)
                    ],
                },
            }
        ),
    }
