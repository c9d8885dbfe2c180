"""Requests that no client should send, drawn by hypothesis from a seed: bodies over HTTP.

What is drawn is data: `tests.campaigns.hostile.main` sends it. Bytes below HTTP are in `raw`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from router.api.openai.fields import IGNORED, REFUSED
from tests.campaigns.hostile.bodies import FIELDS, anything, bodies, numbers, scalars, texts

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
VOCABULARY = 2560
"""Of the demo model."""
MAX_MODEL_LEN = 4096
FEW_TOKENS = 8
"""Asked for where a body does not say: sound requests are to be many, not long."""
T = TypeVar("T")
Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One request."""

    kind: str
    path: str
    body: bytes
    content_type: str = "application/json"


def draw(strategy: st.SearchStrategy[T], count: int, seed: int) -> list[T]:
    """`count` examples, the same ones for the same seed."""
    found: list[T] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(example=strategy)
    def take(example: T) -> None:
        found.append(example)

    take()
    return found


def _case(kind: str, path: str, body: Body, **changes: Any) -> Case:
    return Case(kind=kind, path=path, body=json.dumps({**body, **changes}).encode())


def _few(body: Body) -> Body:
    named = "max_tokens" in body or "max_completion_tokens" in body
    return body if named else {**body, "max_tokens": FEW_TOKENS}


def _sound(model: str, chat: bool) -> tuple[str, Body]:
    if chat:
        return CHAT, {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    return TEXT, {"model": model, "prompt": "hi"}


# ---- fields


def fields(model: str) -> st.SearchStrategy[Case]:
    """A sound request with up to three fields that are evil."""

    def make(drawn: tuple[str, Body]) -> Case:
        path, body = drawn
        return _case("fields", path, _few({"model": model, **body}))

    return bodies((model, model, "nope", None, 5, "\ud800")).map(make)


@st.composite
def nested(draw: st.DrawFn, model: str) -> Case:
    """Values where others belong, deep ones, and fields that are not supported."""
    path, body = _sound(model, draw(st.booleans()))
    names = [*FIELDS, "prompt", "messages", *sorted(IGNORED), *REFUSED]
    deep = st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(names) | texts, inner, max_size=4)
        ),
        max_leaves=24,
    )
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        value = draw(deep)
        for _ in range(draw(st.sampled_from([0, 0, 0, 3, 60, 900]))):
            value = [value] if draw(st.booleans()) else {"a": value}
        body[name] = value
    return _case("nested", path, _few(body))


SOUND: dict[str, st.SearchStrategy[Any]] = {
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True, "continuous_usage_stats": True}),
    "n": st.sampled_from([1, 2, 5, 128]),
    "max_tokens": st.sampled_from([0, 1, 2, 9]),
    "max_completion_tokens": st.sampled_from([0, 1, 9]),
    "min_tokens": st.sampled_from([0, 1, 9, 20]),
    "temperature": st.sampled_from([0, 1e-9, 1, 100]),
    "top_p": st.sampled_from([1e-9, 1]),
    "top_k": st.sampled_from([-1, 0, 1, VOCABULARY, 2**31 - 1]),
    "seed": st.sampled_from([-(2**63), 0, 2**64 - 1]),
    "logprobs": st.sampled_from([True, False, 0, 20]),
    "top_logprobs": st.sampled_from([0, 20]),
    "prompt_logprobs": st.sampled_from([0, 20]),
    "echo": st.booleans(),
    "stop": st.sampled_from(["a", ["a", "aa", "\n"], [" "] * 128]),
    "stop_token_ids": st.sampled_from([[0], list(range(1024))]),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "allowed_token_ids": st.sampled_from([[2], [3], [40], [0, 1, 2, 3], list(range(VOCABULARY))]),
    "bad_words": st.sampled_from([["a"], [" "], ["yes", "no"], ['"', "{", "}"]]),
    "logit_bias": st.sampled_from([{"2": 100}, {"40": -100}, {str(i): -100 for i in range(1024)}]),
    "repetition_penalty": st.sampled_from([1e-9, 100.0]),
    "frequency_penalty": st.sampled_from([-2, 2]),
    "response_format": st.sampled_from([{"type": "json_object"}, {"type": "text"}]),
    "structured_outputs": st.sampled_from(
        [{"choice": ["yes", "no"]}, {"regex": "[0-9]{1,4}"}, {"json_object": True}, {}]
    ),
    "skip_special_tokens": st.booleans(),
    "return_token_ids": st.booleans(),
    "priority": st.sampled_from([0, 9]),
    "slo": st.sampled_from([{"ttft_ms": 1e-9}, {"e2e_ms": 1e9}]),
    "add_generation_prompt": st.booleans(),
    "cache_salt": st.just("salt" * 256),
    "diffusion": st.just({"stream_drafts": True}),
    "tool_choice": st.just("none"),
    "suffix": st.just(""),
}
"""Values that are sound by themselves: some exclude each other."""


@st.composite
def contradictions(draw: st.DrawFn, model: str) -> Case:
    """Many fields at once, none of them wrong by itself."""
    path, body = _sound(model, draw(st.booleans()))
    chosen = st.lists(st.sampled_from(sorted(SOUND)), min_size=2, max_size=9, unique=True)
    for name in draw(chosen):
        body[name] = draw(SOUND[name])
    return _case("contradictions", path, _few(body))


# ---- forms of output

_UNITS = st.sampled_from(
    [
        *("a", "(a|b)", "[^a]", "(", ")", "[", "]", "\\", "(?=a)", "(?:", "|", "*", "+", "?", ".*"),
        *("^", "{2,1000}", "{0,}", "{", "}", "\\d", "\\p{L}", "\\1", "\\b", "(?i)", "🙂", "\0"),
        "\\u{110000}",
    ]
)
_TIMES = st.sampled_from([1] * 12 + [2, 30, 1000, 20_000])
"""Repetitions of a part: most grammars are small, some reach a limit of time, memory or text."""
_REGEX = st.lists(st.tuples(_UNITS, _TIMES), max_size=8).map(
    lambda parts: "".join(unit * times for unit, times in parts)
)
_SCHEMA_WORDS: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(["object", "array", "string", "integer", "number", "null", "x", []]),
    "pattern": _REGEX.filter(lambda text: len(text) < 10_000),
    "format": st.sampled_from(["date-time", "email", "uuid", "ipv6", "regex", "x"]),
    "enum": st.lists(anything, max_size=3),
    "const": anything,
    "minimum": numbers,
    "maximum": numbers,
    "multipleOf": numbers,
    "minLength": numbers,
    "maxLength": numbers,
    "minItems": numbers,
    "maxItems": numbers,
    "uniqueItems": st.booleans(),
    "required": st.lists(texts, max_size=3),
    "$ref": st.sampled_from(
        ["#", "#/$defs/a", "#/properties/a", "http://127.0.0.1:1/x", "#/x", ""]
    ),
    "$defs": st.just({"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#"}]}}),
    "x": anything,
}


def _schema_around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, max_size=3)
    by_name = st.dictionaries(st.sampled_from(["a", "b", "", "\ud800", "🙂"]), inner, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            **_SCHEMA_WORDS,
            **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), several),
            **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), by_name),
            **dict.fromkeys(("items", "additionalProperties", "not", "if", "contains"), inner),
        },
    )


_SCHEMA = st.recursive(
    st.fixed_dictionaries({}, optional=_SCHEMA_WORDS) | st.booleans(), _schema_around, max_leaves=5
)
_RULES = st.sampled_from(
    [
        *(
            "root ::= ",
            "a ::= ",
            "start: ",
            "a: ",
            "%import common.WORD",
            "%ignore /x/",
            '"a"',
            '""',
        ),
        *("root", "a", "start", " | ", "*", "+", "?", "(", ")", "[a-z]", "[^", '"', "/a/", "/(/"),
        *("{1,1000}", "::=", "#", "\\x", "%llguidance {}", "@", "~ 5", "<think>", "🙂", "\0", "\n"),
    ]
)
_EBNF = st.lists(st.tuples(_RULES, _TIMES), max_size=14).map(
    lambda parts: "".join(part * times for part, times in parts)
)
_GRAMMAR = _EBNF | st.sampled_from(
    [
        "root ::= root",
        "root ::= root root",
        "start: start",
        'root ::= a\na ::= a "x" | ""',
        "root ::= " + "(" * 5000 + '"a"' + ")" * 5000,
        "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= "a"\nroot ::= r0',
        "root ::= " + " | ".join(f'"{i}"' for i in range(20_000)),
    ]
)
_TAG = st.fixed_dictionaries(
    {"type": st.sampled_from(["structural_tag", "structural_tag", "x", None])},
    optional={
        "format": st.recursive(
            st.fixed_dictionaries(
                {
                    "type": st.sampled_from(
                        ["const_string", "any_text", "json_schema", "regex", "x"]
                    )
                },
                optional={"value": texts, "json_schema": _SCHEMA, "pattern": _REGEX},
            ),
            lambda inner: st.fixed_dictionaries(
                {"type": st.sampled_from(["tag", "sequence", "or", "triggered_tags"])},
                optional={
                    "begin": texts,
                    "end": texts,
                    "content": inner,
                    "elements": st.lists(inner, max_size=3),
                    "tags": st.lists(inner, max_size=3),
                    "triggers": st.lists(texts, max_size=2),
                },
            ),
            max_leaves=4,
        ),
        "structures": anything,
        "triggers": st.lists(texts, max_size=3) | anything,
    },
)
_NESTED_SCHEMA = st.tuples(st.sampled_from([3, 40, 300, 900]), st.booleans()).map(
    lambda drawn: _deep_schema(*drawn)
)


def _deep_schema(depth: int, is_object: bool) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = (
            {"type": "object", "properties": {"a": schema}, "required": ["a"]}
            if is_object
            else {"type": "array", "items": schema}
        )
    return schema


_KINDS: dict[str, st.SearchStrategy[Any]] = {
    "regex": _REGEX,
    "json": _SCHEMA | _NESTED_SCHEMA | texts,
    "grammar": _GRAMMAR,
    "choice": st.lists(texts, max_size=4) | st.just([str(i) for i in range(30_000)]),
    "structural_tag": _TAG | texts,
    "json_object": st.booleans(),
}


@st.composite
def grammars(draw: st.DrawFn, model: str) -> Case:
    """Regular expressions, schemas, EBNF, Lark, tags: broken, huge, deep, recursive."""
    path, body = _sound(model, draw(st.booleans()))
    kind = draw(st.sampled_from(["regex", "json", "json", "grammar", "structural_tag", "choice"]))
    form = draw(_KINDS[kind])
    how = draw(st.integers(0, 9))
    if kind == "json" and how < 4:
        wrapped = {"name": "x", "schema": form, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": wrapped}
    elif kind == "structural_tag" and how < 4:
        body["response_format"] = form
    else:
        body["structured_outputs"] = {kind: form}
        if how == 9:
            other = draw(st.sampled_from(sorted(_KINDS)))
            body["structured_outputs"][other] = draw(_KINDS[other])
    if how == 8:
        body["allowed_token_ids"] = draw(st.sampled_from([[2], [40], list(range(4, 300))]))
    body["n"] = draw(st.sampled_from([1, 1, 1, 3]))
    body["stream"] = draw(st.booleans())
    return _case("grammars", path, _few(body))


# ---- messages and tokens

_PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "text", "image_url", "input_audio", None])},
    optional={"text": texts | anything, "image_url": anything},
)
_MESSAGE: st.SearchStrategy[Body] = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "user", "system", "assistant", "tool", "x", None, [], 3])},
    optional={
        "content": texts | st.lists(_PART, max_size=3) | anything,
        "name": anything,
        "tool_calls": anything,
        "tool_call_id": anything,
        "reasoning_content": anything,
        "__class__": anything,
    },
)
_TEMPLATE_NAMES = ["thinking", "enable_thinking", "self", "bos_token", "messages", "range", "loop"]
_TEMPLATE_NAMES += [
    "strftime_now",
    "raise_exception",
    "namespace",
    "x y",
    "",
    "__globals__",
    "caller",
]


@st.composite
def messages(draw: st.DrawFn, model: str) -> Case:
    """Roles, contents, parts and variables of the template."""
    body: Body = {"model": model, "messages": draw(st.lists(_MESSAGE, max_size=4))}
    if draw(st.integers(0, 19)) == 0:
        body["messages"] *= draw(st.sampled_from([50, 2000]))
    if draw(st.booleans()):
        names = st.sampled_from(_TEMPLATE_NAMES) | texts
        body["chat_template_kwargs"] = draw(st.dictionaries(names, anything, max_size=3) | anything)
    if draw(st.integers(0, 4)) == 0:
        body["stream"] = draw(st.booleans())
        body["logprobs"] = draw(st.booleans())
    return _case("messages", CHAT, _few(body))


_EDGE_IDS = st.sampled_from(
    [-1, 0, 2, 3, VOCABULARY - 1, VOCABULARY, 2**31 - 1, 2**31, 2**32, 2**63]
)
_IDS = st.lists(st.integers(0, VOCABULARY - 1) | _EDGE_IDS, max_size=6)
_LENGTHS = st.sampled_from([1, 15, 16, 17, MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1, MAX_MODEL_LEN])
_PROMPTS: st.SearchStrategy[Any] = st.one_of(
    _IDS,
    st.lists(_IDS, max_size=4),
    st.tuples(st.integers(0, VOCABULARY), _LENGTHS).map(lambda drawn: [drawn[0]] * drawn[1]),
    st.lists(_EDGE_IDS | scalars, max_size=3),
    st.text(max_size=40),
    st.lists(texts, max_size=5),
    st.just(["hi"] * 2049),
    st.just("é" * 9000),
)


@st.composite
def tokens(draw: st.DrawFn, model: str) -> Case:
    """Token ids and lengths at their bounds and beyond."""
    body: Body = {"model": model, "prompt": draw(_PROMPTS)}
    optional = {
        "max_tokens": st.sampled_from([0, 1, 2, MAX_MODEL_LEN, 2**31 - 1, 2**31]),
        "min_tokens": st.sampled_from([0, 2, MAX_MODEL_LEN, 2**31]),
        "echo": st.booleans(),
        "logprobs": st.sampled_from([0, 1, 20, 21, -1]),
        "prompt_logprobs": st.sampled_from([0, 20, 21]),
        "allowed_token_ids": _IDS,
        "stop_token_ids": _IDS,
        "logit_bias": st.dictionaries(_EDGE_IDS.map(str), numbers, max_size=3),
        "add_special_tokens": st.booleans(),
        "return_token_ids": st.booleans(),
        "n": st.sampled_from([1, 2, 128, 129]),
        "stream": st.booleans(),
    }
    for name in draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)):
        body[name] = draw(optional[name])
    return _case("tokens", TEXT, _few(body))


# ---- what is no JSON

_LITERALS = [
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"1" + b"0" * 5000,
    b"-0",
    b"01",
    b".5",
    b"0x1",
    b"'a'",
]
_LITERALS += [
    b'"\\ud800"',
    b'"\\u12"',
    b'"\xff\xfe"',
    b'"\xed\xa0\x80"',
    b'"\0"',
    b'"\n"',
    b"//",
    b"",
]
_LITERALS += [b"[" * 100_000, b'{"a":' * 50_000, b"[" * 1000 + b"]" * 1000, b'{"a":1,"a":2}', b"}"]
_CONTENT_TYPES = ["application/json", "text/plain", "application/json; charset=utf-16", "", "x"]
_CONTENT_TYPES += ["multipart/form-data; boundary=x", "application/x-www-form-urlencoded"]


@st.composite
def broken(draw: st.DrawFn, model: str) -> Case:
    """Sound bodies that are cut, flipped, filled and badly encoded; some are sound still."""
    path, fields = _sound(model, draw(st.booleans()))
    fields |= {"max_tokens": 2, "stop": ["é🙂"], "logit_bias": {"40": 1.5}, "user": "x"}
    text = json.dumps(fields, ensure_ascii=draw(st.booleans()))
    body = text.encode(draw(st.sampled_from(["utf-8"] * 9 + ["utf-16", "utf-32", "utf-8-sig"])))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(body)))
        how = draw(st.sampled_from(["cut", "flip", "insert", "value", "repeat", "begin"]))
        if how == "cut":
            body = body[:place]
        elif how == "flip":
            body = body[:place] + bytes([draw(st.integers(0, 255))]) + body[place + 1 :]
        elif how == "insert":
            body = body[:place] + draw(st.binary(max_size=6)) + body[place:]
        elif how == "value":
            old = draw(st.sampled_from([b'"hi"', b"2", b"1.5", b'"x"', b":", b'"user"']))
            body = body.replace(old, draw(st.sampled_from(_LITERALS)), 1)
        elif how == "repeat":
            body += body[place:]
        else:
            body = (
                draw(st.sampled_from([b"\xef\xbb\xbf", b"\0", b" \t\r\n", b"null", b")]}',"]))
                + body
            )
    content_type = draw(st.sampled_from(_CONTENT_TYPES)) if draw(st.integers(0, 3)) == 0 else None
    return Case(
        kind="broken",
        path=path,
        body=body,
        content_type=_CONTENT_TYPES[0] if content_type is None else content_type,
    )


KINDS: dict[str, tuple[int, Callable[[str], st.SearchStrategy[Case]]]] = {
    "fields": (32, fields),
    "nested": (10, nested),
    "contradictions": (15, contradictions),
    "grammars": (9, grammars),
    "messages": (9, messages),
    "tokens": (9, tokens),
    "broken": (16, broken),
}
"""Strategies by the model's name, and how many in a hundred are of each."""
