"""Parsing of model output does not depend on chunks, and loses or crashes on nothing."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from router.parsers import (
    FORMATS,
    THOUGHTS,
    Call,
    CallArguments,
    Content,
    OutputParser,
    Piece,
    Thought,
    ToolFormat,
    dialect_of,
)
from router.parsers.formats import format_of
from router.parsers.json_text import JsonObject, closed
from router.parsers.thoughts import thoughts_of
from tests.support.effort import IS_LONG, cases
from tests.support.router.outputs import (
    CALL,
    CALL_END,
    CALLS,
    CITY,
    FORCED,
    NOW,
    SEP,
    STREAMED,
    TABLE,
    Expected,
)
from tests.support.router.rig import build_checkpoint
from worker.core.grammar.native import load_core
from worker.protocol.text.tokenizer import load_tokenizer

TOOLS = {
    "get_weather": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "when": {"type": ["null", "string"]},
        "exact": {"type": "boolean"},
        "tags": {"type": "array"},
    },
    "now": {},
}
IDS = [f"{name}-{index}" for index, (name, _, _) in enumerate(TABLE)]


def parser_of(tools: ToolFormat | None, *, is_thinking: bool = False) -> OutputParser:
    return OutputParser(
        thoughts=THOUGHTS["think"], is_thinking=is_thinking, tools=tools, properties=TOOLS
    )


def read(parser: OutputParser, parts: Iterable[str]) -> Expected:
    """Parses parts the way response writers do."""
    pieces: list[Piece] = []
    for part in parts:
        content = parser.content_of(part)
        if content is None:
            pieces += parser.push(part)
        elif content:
            pieces.append(Content(content))
    return joined(pieces + parser.end())


def test_plain_content_is_recognized() -> None:
    parser = parser_of(FORMATS["hermes"])
    assert parser.content_of("Hi") is None  # reasoning or a call may start
    assert parser.push("Hi") == [Content("Hi")]
    assert [parser.content_of(text) for text in (" there, ", "\n", "x")] == [" there,", "", " \nx"]
    assert parser.content_of("a < b") is None
    assert parser.push("a < b <") == [Content("a < b")]
    assert parser.content_of("b") is None  # after a possible start of a marker
    assert read(parser, ["tool_call>", '{"name": "now"}</tool_call> ']) == ("", "", [NOW])
    assert parser.content_of("c") is None  # after a call


def joined(pieces: Iterable[Piece]) -> Expected:
    thoughts, content = "", ""
    calls: list[tuple[str, Any]] = []
    for piece in pieces:
        assert isinstance(piece, Call) or piece.text
        if isinstance(piece, Call):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
        elif isinstance(piece, Thought):
            thoughts += piece.text
        else:
            content += piece.text
    return thoughts, content, [(name, loaded(arguments)) for name, arguments in calls]


def loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        assert isinstance(json.loads(closed(arguments)), dict)
        return arguments


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize(("name", "text", "expected"), TABLE, ids=IDS)
def test_any_cuts_of_a_text_give_the_same_message(name: str, text: str, expected: Expected) -> None:
    tools = FORMATS[name]
    assert read(parser_of(tools), [text]) == expected
    assert read(parser_of(tools), text) == expected
    for place in range(len(text)):
        assert read(parser_of(tools), cut(text, [place])) == expected
    draws = random.Random(0)
    for _ in range(30):
        places = [draws.randrange(len(text) + 1) for _ in range(draws.randrange(8))]
        assert read(parser_of(tools), cut(text, places)) == expected


@pytest.mark.parametrize(("name", "text", "expected"), TABLE, ids=IDS)
def test_a_text_may_end_anywhere(name: str, text: str, expected: Expected) -> None:
    """Truncated text is content or a call, not an error; the text before is unaffected."""
    for end in range(len(text)):
        thoughts, _, calls = read(parser_of(FORMATS[name]), [text[:end]])
        assert expected[0].startswith(thoughts) or thoughts.startswith(expected[0])
        assert [call[0] for call in calls] == [call[0] for call in expected[2][: len(calls)]]


MARKERS = sorted({m for made in FORMATS.values() for m in made.markers})
PARTS = st.sampled_from(
    [
        *MARKERS,
        "<think>",
        "</think>",
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        "\n",
        " ",
        "now",
        '{"name": "now"}',
        "now()",
        "x",
        ";",
        '{"name": "now", "arguments": {',
        '[{"name": "now", "parameters": {',
        f"{CALL}now{SEP}{{",
        "[TOOL_CALLS]now{",
        "<tool_call>now<arg_key>a</arg_key><arg_value>",
        "<function=get_weather><parameter=city>\n",
        "<parameter=days>",
        '<invoke name="get_weather">',
        '<parameter name="days">',
        "<|tool_call>call:now{",
        "<|tool_call_begin|>now<|tool_call_argument_begin|>{",
        '<|tools_prefix|>[{"now": {',
        '"a": ',
        '"\\ud83d\\ude00',
        "\\u00",
        "}, {",
        ", 1.5e3",
        "nul",
        "-",
    ]
) | st.text(max_size=3)


@settings(max_examples=cases(300), deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    parts=st.lists(PARTS, max_size=12),
    is_thinking=st.booleans(),
    data=st.data(),
)
def test_whatever_a_model_writes(
    name: str, parts: list[str], is_thinking: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    tools = FORMATS[name]
    whole = read(parser_of(tools, is_thinking=is_thinking), [text])
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    assert read(parser_of(tools, is_thinking=is_thinking), cut(text, places)) == whole
    assert read(parser_of(tools, is_thinking=is_thinking), text) == whole


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"pythonic", "olmo3", "harmony"}))
def test_arguments_are_streamed_as_generated(name: str) -> None:
    parser, text = parser_of(FORMATS[name]), STREAMED[name]
    start, end = text.index(CITY), text.index(CITY) + len(CITY)
    pieces = parser.push(text[:start])
    for place in range(start, end):
        pieces += parser.push(text[place])
        valid = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
        assert valid.endswith('{"city":"' + CITY[: place + 1 - start])
    pieces += parser.push(text[end:]) + parser.end()
    assert joined(pieces)[2][-1] == ("get_weather", {"city": CITY})


def test_a_text_in_arguments_may_hold_markers() -> None:
    """A call ends with its object, not at a text in it that looks like the marker."""
    text = '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>"}}</tool_call>b'
    assert read(parser_of(FORMATS["hermes"]), text) == (
        *("", "b"),
        [("now", {"a": "</tool_call>"})],
    )


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "now", "arguments": {"a": 1, "b": "x', "", [("now", '{"a":1,"b":"x')]),
        ('{"name": "now", "arguments": {"a": 12', "", [("now", '{"a":')]),
        ('{"name": "now", "arguments": {"a": oh}}', "oh}}</tool_call>", [("now", '{"a":')]),
        ('{"name": "now", "arguments": {}} oh', "oh</tool_call>", [NOW]),
        ('{"name": "now", "arguments": {}, "id": 3}\n</tool_', "", [NOW]),
    ],
)
def test_returned_parts_are_final(text: str, content: str, calls: list[Any]) -> None:
    """Invalid arguments are content; the call before is returned up to them."""
    text = "<tool_call>" + text + ("</tool_call>" if content else "")
    parsed = read(parser_of(FORMATS["hermes"]), text)
    assert (parsed[1].removeprefix("} "), parsed[2]) == (content, calls)
    assert read(parser_of(FORMATS["hermes"]), [text]) == parsed


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Tokenizers never output half a surrogate pair.
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=cases(150), deadline=None)
@given(
    value=st.dictionaries(st.text(max_size=3), VALUES, max_size=4),
    indent=st.sampled_from([None, 1]),
    data=st.data(),
)
def test_an_object_is_the_same_however_it_comes(value: Any, indent: Any, data: Any) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()), indent=indent)
    parser, valid = JsonObject(), ""
    for char in text + " }":
        assert isinstance(json.loads(closed(valid)), dict)
        valid += parser.push(char)
    assert (json.loads(valid), parser.is_broken, parser.rest) == (value, False, " }")
    whole = JsonObject()
    assert (whole.push(text + " }"), whole.rest) == (valid, " }")
    assert closed(valid) == valid


def test_a_call_with_text_behind_it_is_text() -> None:
    for name, text in (
        ("llama3_json", '{"name": "now"} is a call'),
        ("hermes", '<tool_call>{"name": "now"}{"a": 1}</tool_call>'),
    ):
        assert read(parser_of(FORMATS[name]), text) == ("", text, [])


def test_without_tools_their_markers_are_text() -> None:
    text = '<think>a</think><tool_call>{"name": "now"}</tool_call>'
    assert read(parser_of(None), text) == ("a", '<tool_call>{"name": "now"}</tool_call>', [])


def test_a_prompt_may_have_opened_the_thought() -> None:
    assert read(parser_of(None, is_thinking=True), "\na b\n</think>\n\nc") == ("a b", "c", [])


def test_one_call_where_one_is_wanted() -> None:
    parser = OutputParser(
        thoughts=None, is_thinking=False, tools=FORMATS["json"], properties=TOOLS, single_call=True
    )
    assert read(parser, '[{"name": "now"}, {"name": "now"}]') == ("", "", [NOW])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_depth_is_no_error(name: str) -> None:
    tools = FORMATS[name]
    opening = tools.regions[0][0] if tools.regions else tools.leading
    for body in ("[" * 10_000, "(" * 10_000, "now(" * 5000, "-" * 60_000):
        _, content, calls = read(parser_of(tools), [opening + body])
        assert (calls, body in content) == ([], True), body[:4]


SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}


def acceptor(tag: dict[str, Any]) -> Callable[[str], bool]:
    """Whether a text conforms to a structural tag, by xgrammar's core: its package takes 2 s to
    import."""
    core = load_core().bindings
    no_tokens = core.TokenizerInfo([], 0, 0, [], False)
    compiled = core.GrammarCompiler(no_tokens, 1, False, -1).compile_structural_tag(json.dumps(tag))

    def accepts(text: str) -> bool:
        matcher = core.GrammarMatcher(compiled, None, True, 0, None)  # ends without an end token
        return bool(matcher.accept_string(text, False) and matcher.is_terminated())

    return accepts


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_is_forced_is_what_is_read(name: str) -> None:
    tools = FORMATS[name]
    assert bool(tools.before) == (name in FORCED)
    if not tools.before:
        return
    text = FORCED[name]
    single, many = (
        acceptor(tools.calls_tag(SCHEMAS, single_call=single_call)) for single_call in (True, False)
    )
    assert single(text)
    assert not single("x" + text)
    assert not single(text.replace("get_weather", "get_money"))
    begin, end = tools.around
    twice = begin + tools.separator.join([text[len(begin) : len(text) - len(end)]] * 2) + end
    assert many(twice)
    assert not single(twice)
    call = ("get_weather", {"city": "Bern", "days": 3})
    assert read(parser_of(tools), text) == ("", "", [call])
    assert read(parser_of(tools), twice) == ("", "", [call, call])


@pytest.mark.parametrize("name", sorted(FORCED))
def test_what_is_admitted_is_text_with_right_calls(name: str) -> None:
    tools, text = FORMATS[name], FORCED[name]
    tag = tools.free_text_tag(SCHEMAS, single_call=False)
    assert (tag is None) == (name in ("json", "llama3_json", "hunyuan", "nemotron"))
    if tag is None:
        return
    accepts = acceptor(tag)
    assert accepts("no call, { or <tool>")
    assert accepts(f"I look. {text} and {text}")
    assert not accepts("I look. " + text.replace("get_weather", "get_money"))
    assert not accepts(text.replace("3", "x"))


@pytest.mark.parametrize(
    ("template", "tools", "thoughts"),
    [
        ("{{ message.content }}", None, None),
        ("<tool_call>\n{{ call | tojson }}\n</tool_call> <think> </think>", "hermes", "think"),
        ("<tool_call>\n<function={{ name }}>\n<parameter=", "qwen3_coder", None),
        ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key></think>", "glm45", "think"),
        ("{{ '[TOOL_CALLS]' }}[THINK][/THINK]", "mistral", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3_json", None),
        ("[func_name1(params_name1=params_value1)]", "pythonic", None),
        (f"{{{{ '{CALLS}{CALL}' }}}}{{{{ content.split('</think>') }}}}", "deepseek_v31", "think"),
    ],
)
def test_formats_are_found_in_templates(
    template: str, tools: str | None, thoughts: str | None
) -> None:
    found, marked = format_of(template), thoughts_of(template)
    assert (found.name if found else None) == tools
    assert (marked.name if marked else None) == thoughts


def test_markers_that_are_special_tokens_stand_in_the_text(tmp_path: Path) -> None:
    """Calls with such markers cannot be enforced as they are: no grammar generates these tokens."""
    build_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ '[TOOL_CALLS]' }}{{ tools }}")
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    dialect = dialect_of(tokenizer)
    assert dialect.tools is FORMATS["mistral"]
    assert dialect.forced is FORMATS["json"]
    assert dialect.special == {"[TOOL_CALLS]", "[ARGS]"}
    ids = tokenizer.encode("<|im_start|>[TOOL_CALLS]now[ARGS]{}<|im_end|>")
    shown = tokenizer.detokenizer(shown=dialect.special).push(ids)
    assert shown == "[TOOL_CALLS]now[ARGS]{}"
    assert tokenizer.detokenizer().push(ids) == "now{}"
    assert dialect_of(tokenizer, "none", "mistral").tools is None
    with pytest.raises(ValueError, match="choose from hermes"):
        dialect_of(tokenizer, "hermit")


NUM_CHARACTERS, MAX_S = (100_000, 0.7) if IS_LONG else (50_000, 0.35)
"""Length of texts, and the maximum CPU time in seconds."""
REPEATED = ["<arg_key>", "<function=", "<parameter=", "<parameter=x>", "{};", "{}", "[]", '"', " "]
REPEATED += ["<tool_call></tool_call>", "[TOOL_CALLS]", "<tool_call>", f"{CALL}{CALL_END}", "<"]
REPEATED += ["<tool_call>now</tool_call>", "now", "<arg_key>a</arg_key>", "<think></think>"]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_time_to_read_grows_with_the_text(name: str) -> None:
    """It runs on the event loop, and clients can make models write anything."""
    tools = FORMATS[name]
    opening = tools.regions[0][0] if tools.regions else tools.leading
    for part in REPEATED:
        text = opening + part * (NUM_CHARACTERS // len(part))
        taken = []
        while not taken or (min(taken) >= MAX_S and len(taken) < 3):  # includes garbage collection
            began = time.thread_time()
            read(parser_of(tools), [text])
            taken.append(time.thread_time() - began)
        assert min(taken) < MAX_S, part
