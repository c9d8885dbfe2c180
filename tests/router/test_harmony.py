"""Parsing of gpt-oss' messages in any chunks; history and forms as in its template."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from router.api.openai.messages import chat_messages
from router.parsers import FORMATS, THOUGHTS, Call, CallArguments, Dialect, Thought, dialect_of
from router.parsers import num_thought_tokens as count_thoughts
from router.parsers.harmony import MARKERS
from router.parsers.json_text import closed
from tests.support.effort import cases
from tests.support.router.agent import agent_rig
from tests.support.router.rig import Rig, build_checkpoint
from worker.protocol.text.tokenizer import Tokenizer, load_tokenizer

TOOLS: dict[str, Any] = {"get_weather": {"city": {"type": "string"}}, "now": {}}
HARMONY = Dialect(tools=FORMATS["harmony"], thoughts=THOUGHTS["harmony"])
ANALYSIS = "<|channel|>analysis<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
BERN = ("get_weather", {"city": "Bern"})

Expected = tuple[str, str, list[tuple[str, Any]]]
TABLE: list[tuple[str, Expected]] = [
    (f"{ANALYSIS}hm, <b{NEXT}{FINAL}Hello\n there <|return|>", ("hm, <b", "Hello\n there ", [])),
    (f"{FINAL}Hi", ("", "Hi", [])),
    ("<|message|>Hi", ("", "Hi", [])),
    (f'{ANALYSIS}so{NEXT}{WEATHER}{{"city": "Bern"}}<|call|>', ("so", "", [BERN])),
    (
        (
            f"{ANALYSIS}a{NEXT}{COMMENTARY}I look.{NEXT} to=functions.get_weather"
            f'<|channel|>commentary json<|message|> {{"city":"Bern"}}\n<|call|>'
            f"<|start|>assistant{ANALYSIS}b<|end|>"
            f"<|start|>assistant<|channel|>commentary to=functions.now<|message|>{{}}"
        ),
        ("a\nb", "I look.", [BERN, ("now", {})]),
    ),
    (
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Bern"}',
        ("", "", [BERN]),
    ),
    (
        '<|channel|>commentary json to=functions.get_weather<|message|>{"city": "Bern"}<|call|>',
        ("", "", [BERN]),
    ),
    ('<|channel|>analysis to=get_weather code<|message|>{"city": "Bern"}', ("", "", [BERN])),
    (f"{COMMENTARY}One.{NEXT}{FINAL}Two.", ("", "One.\nTwo.", [])),
    (f"{ANALYSIS}no end{FINAL}yes", ("no end", "yes", [])),
    (f"{ANALYSIS}no end<|start|>assistant{FINAL}yes", ("no end", "yes", [])),
    ("<|channel|>commentary to=functions.now<|message|><|call|>", ("", "", [("now", {})])),
    (f'{WEATHER}{{"city": "Be', ("", "", [("get_weather", '{"city":"Be')])),
    # Malformed headers are content.
    ("plain, 1 < 2 <|x", ("", "plain, 1 < 2 <|x", [])),
    ("two things", ("", "two things", [])),
    (f"{WEATHER}no JSON<|call|>", ("", f"{WEATHER}no JSON", [])),
    (f'{WEATHER}{{"city" 3}}', ("", "3}", [("get_weather", '{"city"')])),
    (f"{WEATHER}{{}} more<|call|>", ("", " more", [("get_weather", {})])),
    (
        "<|channel|>commentary to=browser.search<|message|>{}",
        ("", "<|channel|>commentary to=browser.search<|message|>{}", []),
    ),
    (f"<|channel|>secret<|message|>a{NEXT}{FINAL}b", ("", "<|channel|>secret<|message|>a\nb", [])),
    (f"{FINAL}a<|message|>b<|constrain|>c", ("", "a<|message|>b<|constrain|>c", [])),
    ("<|channel|>" + "final " * 100, ("", "<|channel|>" + "final " * 100, [])),
]


def read(parts: Iterable[str], *, is_header: bool = True, dialect: Dialect = HARMONY) -> Expected:
    parser = dialect.new_parser(
        tools=dialect.tools, properties=TOOLS, is_thinking=is_header, single_call=False
    )
    thoughts, content = "", ""
    calls: list[tuple[str, Any]] = []
    for piece in [piece for part in parts for piece in parser.push(part)] + parser.end():
        assert isinstance(piece, Call) or piece.text
        if isinstance(piece, Call):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
        elif isinstance(piece, Thought):
            thoughts += piece.text
        else:
            content += piece.text
    assert (parser.num_calls, parser.has_thoughts) == (len(calls), bool(thoughts))
    return thoughts, content, [(name, loaded(arguments)) for name, arguments in calls]


def loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        assert isinstance(json.loads(closed(arguments)), dict)
        return arguments


def cut(text: str, places: Iterable[int]) -> list[str]:
    return [text[start:end] for start, end in pairwise([0, *sorted(places), len(text)])]


@pytest.mark.parametrize(("text", "expected"), TABLE, ids=range(len(TABLE)))
def test_any_cuts_of_a_text_give_the_same_message(text: str, expected: Expected) -> None:
    assert read([text]) == expected
    assert read(text) == expected
    for place in range(len(text)):
        assert read(cut(text, [place])) == expected


def places_between_tokens(text: str) -> list[int]:
    inside = {
        place
        for found in re.finditer("|".join(map(re.escape, MARKERS)), text)
        for place in range(found.start() + 1, found.end())
    }
    return [place for place in range(len(text)) if place not in inside]


@pytest.mark.parametrize(("text", "expected"), TABLE[:13], ids=range(13))
def test_a_text_may_end_anywhere(text: str, expected: Expected) -> None:
    """An incomplete header is dropped, and no marker is content. A marker is never split."""
    for end in places_between_tokens(text):
        thoughts, content, calls = read([text[:end]])
        assert expected[0].startswith(thoughts)
        assert not any(marker in content for marker in MARKERS)
        assert [call[0] for call in calls] == [call[0] for call in expected[2][: len(calls)]]


PARTS = st.sampled_from(
    [
        *(*sorted(MARKERS), ANALYSIS, COMMENTARY, FINAL, NEXT, WEATHER, "assistant", "final"),
        *(" to=functions.now", '{"city": "Bern"}', "{", "}", "\n", " ", "a", "<", "<|", '"'),
    ]
)


@settings(max_examples=cases(300), deadline=None)
@given(st.lists(PARTS, max_size=12).map("".join), st.data())
def test_whatever_comes_is_read_the_same(text: str, data: st.DataObject) -> None:
    whole = read([text])
    seed = data.draw(st.integers(0, 999))
    for _ in range(5):
        draws = random.Random(seed)
        seed += 1
        assert read(cut(text, [draws.randrange(len(text) + 1) for _ in range(4)])) == whole
    assert read(text) == whole


def test_white_space_after_text_behind_a_call_is_dropped_in_any_pieces() -> None:
    """It was kept if it came in the same piece as the text before it."""
    text = f'{WEATHER}{{"city": "Bern"}}see \nbelow\n'
    expected = ("", "see \nbelow", [("get_weather", {"city": "Bern"})])
    for at in range(len(WEATHER), len(text)):
        assert read([text[:at], text[at:]]) == expected


def test_without_tools_calls_are_text() -> None:
    text = f'{ANALYSIS}a{NEXT}{WEATHER}{{"city": "Bern"}}<|call|>'
    dialect = Dialect(thoughts=THOUGHTS["harmony"])
    call = text.removeprefix(f"{ANALYSIS}a<|end|>").removesuffix("<|call|>")
    assert read([text], dialect=dialect) == ("a", call, [])


def test_a_continued_answer_has_no_header() -> None:
    assert read(["to be", " or not<|return|>"], is_header=False) == ("", "to be or not", [])


def test_arguments_are_streamed_as_generated() -> None:
    parser = HARMONY.new_parser(
        tools=FORMATS["harmony"], properties=TOOLS, is_thinking=True, single_call=True
    )
    assert parser.push(WEATHER) == [], "its arguments have not begun"
    assert parser.push('{"city": "Be') == [Call("get_weather"), CallArguments('{"city":"Be')]
    assert parser.push('rn"}') == [CallArguments('rn"}')]
    assert parser.push(f"<|call|><|start|>assistant{WEATHER}{{}}") == [], "it is one too many"


def test_calls_of_another_format_stand_in_the_answer() -> None:
    """Enforced ones are."""
    dialect = Dialect(tools=FORMATS["json"], thoughts=THOUGHTS["harmony"])
    text = f'{ANALYSIS}a{NEXT}{FINAL}[{{"name": "now", "parameters": {{}}}}]'
    assert read(text, dialect=dialect) == ("a", "", [("now", {})])


TEMPLATE = """\
{%- for tool in tools or [] %}{{ '<|start|>developer<|message|>' + tool.function.name }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls is defined %}
{%- if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}
{%- if message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=functions.' + message.tool_calls[0].function.name }}
{{- '<|channel|>commentary json<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    folder = tmp_path_factory.mktemp("harmony")
    build_checkpoint(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(sorted(MARKERS))
    backend.save(str(folder / "tokenizer.json"))
    return folder, load_tokenizer(str(folder))


@pytest.fixture
async def rig(model: tuple[Path, Tokenizer]) -> AsyncIterator[Rig]:
    rig = agent_rig(*model)
    await rig.start()
    yield rig
    await rig.stop()


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


async def test_a_chat(rig: Rig) -> None:
    rig.answer = f'{ANALYSIS}so it is{NEXT}{WEATHER}{{"city": "Bern"}}'
    response = await rig.chat(tools=[tool("get_weather")])
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"] == "so it is"
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city":"Bern"}'}
    number = len(rig.tokenizer.encode("so it is", add_special_tokens=False))
    assert response.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": number}
    stops = rig.submits()[-1].sampling.stop_token_ids
    assert set(stops) == {rig.tokenizer.token_id(marker) for marker in ("<|call|>", "<|return|>")}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_a_forced_call_comes_in_the_answer(rig: Rig, choice: object) -> None:
    rig.answer = f'{ANALYSIS}hm{NEXT}{FINAL}[{{"name": "now", "parameters": {{}}}}]'
    response = await rig.chat(tools=[tool("now")], tool_choice=choice)
    message = response.json()["choices"][0]["message"]
    assert message["reasoning"] == "hm"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
    thought = rig.submits()[-1].sampling.thought
    assert thought is not None
    assert thought.is_open
    ids = rig.tokenizer.encode(FINAL, add_special_tokens=False)
    assert [*thought.before, thought.closing] == ids


async def test_a_form_holds_the_answer_alone(rig: Rig) -> None:
    rig.answer = f"{ANALYSIS}hm{NEXT}{FINAL}{{}}"
    response = await rig.chat(response_format={"type": "json_object"})
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "{}")


def test_each_call_of_the_history_is_a_message(model: tuple[Path, Tokenizer]) -> None:
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("a", "b")
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
        {"role": "user", "content": "well?"},
    ]
    template = model[1].chat_template
    assert template is not None
    made = chat_messages(messages, template, single_calls=True)
    rendered = template.render(made, add_generation_prompt=True)
    call = "<|start|>assistant to=functions.{0}<|channel|>commentary json<|message|>{{}}<|call|>"
    assert rendered == (
        f"<|start|>user<|message|>hi{NEXT}{ANALYSIS}hm\nI look.<|end|>{call.format('a')}"
        f"<|start|>tool<|message|>A<|end|>{call.format('b')}<|start|>tool<|message|>B<|end|>"
        f"<|start|>user<|message|>well?{NEXT}"
    )


def test_the_dialect_is_found_in_the_template(model: tuple[Path, Tokenizer]) -> None:
    dialect = dialect_of(model[1])
    assert (dialect.is_harmony, dialect.has_single_calls) == (True, True)
    assert dialect.special == MARKERS
    assert dialect.forced is FORMATS["json"], "grammars yield no special tokens"
    assert dialect_of(model[1], "", "none").tools is None
    assert dialect_of(model[1], "none", "").tools is None


def test_tokens_of_thoughts(model: tuple[Path, Tokenizer]) -> None:
    tokenizer = model[1]
    text = f"{ANALYSIS}a{NEXT}{FINAL}b{NEXT}{ANALYSIS}c{NEXT}{WEATHER}{{}}<|call|>"
    assert count_thoughts(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == 2
