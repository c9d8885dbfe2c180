"""Messages of clients that templates would otherwise drop, quote twice or fail on."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from router.api.openai import values
from router.api.openai.messages import chat_messages
from router.errors import ApiError
from worker.protocol.text.chat_template import ChatTemplate

HERMES = """\
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls is defined %}
{{- '<|im_start|>assistant\n' }}
{%- for call in message.tool_calls %}
{{- '<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role in ['system', 'user', 'assistant', 'tool'] %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{%- if message.role == 'tool' %}{{ message.name + ': ' }}{% endif %}
{{- message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
"""
USER = {"role": "user", "content": "hi"}


def call(arguments: object, name: str = "f", call_id: str = "call_1") -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def render(*messages: dict[str, Any], source: str = HERMES) -> str:
    template = ChatTemplate(source, {})
    return template.render(chat_messages(messages, template))


@pytest.mark.parametrize("calls", [None, []])
def test_an_answer_without_calls_keeps_its_text(calls: object) -> None:
    """Clients send back the result of `message.model_dump()`."""
    answer = {"role": "assistant", "content": "hello", "tool_calls": calls}
    assert render(USER, answer) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Bern", "days": [1, 2]}', {"city": "Bern", "days": [1, 2]}),
        ({"city": "Zürich"}, {"city": "Zürich"}),
        ("", {}),
        (" ", {}),
        ("{}", {}),
        (None, {}),
        ('{"city": ', {}),
        ('{"city": "Be', {"city": "Be"}),
        ('{"city": "Bern", "days": [1, 2', {"city": "Bern", "days": [1]}),
        ('{"a": {"b": "x\\u00', {"a": {"b": "x"}}),
        ('{"a": NaN, "b": [-Infinity]}', {"a": "NaN", "b": ["-Infinity"]}),
        ('{"a": 1} and more', {"arguments": '{"a": 1} and more'}),
        ('[{"a": 1}]', {"arguments": [{"a": 1}]}),
        ('"text"', {"arguments": "text"}),
        ("no JSON", {"arguments": "no JSON"}),
        ([1], {"arguments": [1]}),
        ("\ufffd", {"arguments": "\ufffd"}),
        ("[" * 5000, {"arguments": "[" * 5000}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_arguments_are_objects_to_templates(arguments: object, expected: object) -> None:
    text = render({"role": "assistant", "content": None, "tool_calls": [call(arguments)]})
    written = json.dumps({"name": "f", "arguments": expected}, ensure_ascii=False)
    assert text == f"<|im_start|>assistant\n<tool_call>\n{written}\n</tool_call><|im_end|>\n"


def test_the_clients_messages_stay_as_they_are() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]}
    before = json.dumps(message)
    render(message)
    assert json.dumps(message) == before


@pytest.mark.parametrize(
    "calls",
    [
        {"id": "x"},
        "f()",
        [None],
        [{}],
        [{"function": None}],
        [{"function": {"arguments": "{}"}}],
    ],
)
def test_calls_that_are_none_are_named(calls: object) -> None:
    with pytest.raises(ApiError, match=r"messages\[1\]\.tool_calls") as caught:
        render(USER, {"role": "assistant", "content": "x", "tool_calls": calls})
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_values_in_arguments_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_VALUES", 1000)
    calls = [call('{"a": ["[[[[,,,,"]}')]
    render({"role": "assistant", "content": None, "tool_calls": calls * 20})
    with pytest.raises(ApiError, match="the maximum is"):
        render({"role": "assistant", "content": None, "tool_calls": calls * 40})


@pytest.mark.parametrize("content", ["12 C", [{"type": "text", "text": "12 C"}]])
def test_a_tools_answer_has_its_name(content: object) -> None:
    call_message = {"role": "assistant", "content": None, "tool_calls": [call("{}", "get_weather")]}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": content}
    assert render(call_message, answer).endswith("<|im_start|>tool\nget_weather: 12 C<|im_end|>\n")


def test_a_developer_is_the_system_where_there_is_no_other() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        USER,
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    ]
    assert render(*messages) == (
        "<|im_start|>system\nBe kind.\n\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )
    knows = (
        "{% for m in messages %}{{ m.role + ':' + m.content + ' ' }}{% endfor %}{# 'developer' #}"
    )
    assert render(*messages, source=knows) == "system:Be kind. user:hi developer:Be brief. "


def test_several_systems_stay_where_no_developer_is() -> None:
    messages = [{"role": "system", "content": "a"}, USER, {"role": "system", "content": "b"}]
    assert render(*messages).count("<|im_start|>system") == 2


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_the_name_that_the_template_reads(name: str) -> None:
    text = render(USER, {"role": "assistant", "content": "7", name: "3 + 4"})
    assert text.endswith("<|im_start|>assistant\n<think>3 + 4</think>7<|im_end|>\n")
    harmony = "{% for m in messages %}{{ m.thinking + '|' + m.content }}{% endfor %}"
    assert render({"role": "assistant", "content": "7", name: "3"}, source=harmony) == "3|7"


def test_reasoning_is_a_text() -> None:
    with pytest.raises(ApiError, match=r"messages\[0\]\.reasoning must be a string"):
        render({"role": "assistant", "content": "7", "reasoning": ["x"]})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "no"},
        {"type": "output_text", "text": "no", "annotations": []},
        {"type": "refusal", "refusal": "no"},
    ],
)
def test_parts_that_are_text(part: dict[str, Any]) -> None:
    assert render({"role": "assistant", "content": [part]}).endswith("\nno<|im_end|>\n")


async def test_history_of_an_agent_reaches_the_worker(rig: Any) -> None:
    await rig.start()
    messages = [
        {"role": "developer", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "hello", "tool_calls": None, "refusal": None},
        USER,
    ]
    response = await rig.client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text
    [submit] = rig.submits()
    ids = memoryview(submit.prompt).cast("i").tolist()
    assert rig.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_ids_of_calls_are_what_the_template_takes() -> None:
    """Mistral's template requires nine letters and digits; calls and results keep matching ids."""
    called = [{"id": i, "function": {"name": "f"}} for i in ("call_0123456789abcdef", "Ab3456789")]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": called},
        *({"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in called),
    ]
    assert chat_messages(messages, None)[1]["tool_call_id"] == called[0]["id"]
    assistant, *answers = chat_messages(messages, None, ids="short")
    ids = [call["id"] for call in assistant["tool_calls"]]
    assert [answer["tool_call_id"] for answer in answers] == ids
    assert ids[1] == "Ab3456789"
    assert re.fullmatch("[A-Za-z0-9]{9}", ids[0])
    _, *answers = chat_messages(messages * 2, None, ids="indexed")
    answered = [m["tool_call_id"] for m in answers if m["role"] == "tool"]
    assert answered == [f"functions.f:{index}" for index in range(4)]


@pytest.mark.parametrize(
    "written", ["'' + given + '}'", "given + '}'", "given ~ '}'", "given|string + '}'"]
)
def test_templates_that_print_arguments_print_json(written: str) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": '{"a": [true, null, "ü"]}'}}
    messages = chat_messages([{"role": "assistant", "tool_calls": [call]}], None)
    given = "{% set given = messages[0].tool_calls[0].function.arguments %}"
    for source in (written, "given|tojson + '}'"):
        template = ChatTemplate(f"{given}{{{{ {source} }}}}", {})
        assert template.render(messages) == '{"a": [true, null, "ü"]}}'
