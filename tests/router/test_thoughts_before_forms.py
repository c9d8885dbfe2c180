"""A model that reasons before structured output: a schema or calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.support.router.agent import agent_rig, build_agent, prompt_of
from tests.support.router.rig import Rig
from worker.protocol.structured import ThoughtTokens
from worker.protocol.text.tokenizer import Tokenizer, load_tokenizer

NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CLOSED = "{% else %}{{ '<think>\n\n</think>\n\n' }}"
"""The template's marker of empty reasoning."""
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "[{] ?}"}},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    """A tokenizer whose reasoning markers are tokens."""
    folder = tmp_path_factory.mktemp("thinker")
    build_agent(folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    backend.save(str(folder / "tokenizer.json"))
    return folder, load_tokenizer(str(folder))


@asynccontextmanager
async def edited(folder: Path, copy: Path, old: str, new: str) -> AsyncIterator[Rig]:
    """A gateway for the model with another template."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    template = copy / "chat_template.jinja"
    source = template.read_text()
    assert old in source
    template.write_text(source.replace(old, new))
    rig = agent_rig(copy, load_tokenizer(str(copy)))
    await rig.start()
    yield rig
    await rig.stop()


@pytest.fixture
async def thinker(thinking_model: tuple[Path, Tokenizer]) -> AsyncIterator[Rig]:
    rig = agent_rig(*thinking_model)
    await rig.start()
    yield rig
    await rig.stop()


async def message_of(rig: Rig, **fields: Any) -> dict[str, Any]:
    response = await rig.chat(**fields)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def thought_of(rig: Rig) -> ThoughtTokens | None:
    return rig.submits()[-1].sampling.thought


@pytest.mark.parametrize("form", FORMS, ids=["format", "regex"])
async def test_a_form_behind_a_thought(thinker: Rig, form: dict[str, Any]) -> None:
    thinker.answer = "hm\n</think>{}"
    message = await message_of(thinker, reasoning_effort="high", **form)
    assert (message["reasoning"], message["content"]) == ("hm", "{}")
    opening, closing = (thinker.tokenizer.token_id(m) for m in ("<think>", "</think>"))
    assert opening is not None
    assert closing is not None
    assert thought_of(thinker) == ThoughtTokens(opening=opening, closing=closing, is_open=True)


async def test_forced_calls_behind_a_thought(thinker: Rig) -> None:
    thinker.answer = f"hm\n</think>{CALL}"
    message = await message_of(
        thinker, reasoning_effort="high", tools=[NOW], tool_choice="required"
    )
    assert (message["reasoning"], message["content"]) == ("hm", None)
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}
    thought = thought_of(thinker)
    assert thought is not None
    assert thought.is_open


async def test_no_thought_where_the_prompt_has_ended_it(thinker: Rig) -> None:
    thinker.answer = "{}"
    message = await message_of(thinker, reasoning_effort="none", **FORMS[0])
    assert message == {"role": "assistant", "content": "{}"}
    assert thought_of(thinker) is None


async def test_a_thought_may_begin_where_the_prompt_has_said_nothing_of_it(thinker: Rig) -> None:
    thinker.answer = "<think>hm</think>{}"
    body_fields = {**FORMS[0], "add_generation_prompt": False}
    message = await message_of(thinker, **body_fields)
    assert (message["reasoning"], message["content"]) == ("hm", "{}")
    thought = thought_of(thinker)
    assert thought is not None
    assert not thought.is_open


async def test_no_thought_where_the_template_would_have_begun_one(
    thinking_model: tuple[Path, Tokenizer], tmp_path: Path
) -> None:
    async with edited(thinking_model[0], tmp_path, CLOSED, "{# </think> #}") as rig:
        rig.answer = "{}"
        assert await message_of(rig, **FORMS[0]) == {"role": "assistant", "content": "{}"}
        assert thought_of(rig) is None
        rig.answer = "hm</think>{}"
        message = await message_of(rig, reasoning_effort="high", **FORMS[0])
        assert (message["reasoning"], message["content"]) == ("hm", "{}")
        thought = thought_of(rig)
        assert thought is not None
        assert thought.is_open


async def test_a_model_that_begins_thoughts_itself_may(
    thinking_model: tuple[Path, Tokenizer], tmp_path: Path
) -> None:
    async with edited(thinking_model[0], tmp_path, "{{ '<think>\n' }}", "") as rig:
        rig.answer = "<think>hm</think>{}"
        message = await message_of(rig, reasoning_effort="high", **FORMS[0])
        assert (message["reasoning"], message["content"]) == ("hm", "{}")
        thought = thought_of(rig)
        assert thought is not None
        assert not thought.is_open


async def test_markers_that_are_no_tokens_leave_no_room_for_thoughts(agent: Rig) -> None:
    agent.answer = "{}"
    await message_of(agent, reasoning_effort="high", **FORMS[0])
    assert thought_of(agent) is None


async def test_without_a_form_there_is_nothing_to_wait_for(thinker: Rig) -> None:
    thinker.answer = "hm</think>so"
    message = await message_of(thinker, reasoning_effort="high", tools=[NOW])
    assert message["content"] == "so"
    assert thought_of(thinker) is None


@pytest.mark.parametrize("form", [{}, FORMS[0]], ids=["free", "format"])
async def test_a_budget_is_one_of_tokens(thinker: Rig, form: dict[str, Any]) -> None:
    thinker.answer = "hm</think>{}"
    await message_of(thinker, reasoning_effort="high", thinking_token_budget=7, **form)
    thought = thought_of(thinker)
    assert thought is not None
    assert (thought.budget, thought.is_open) == (7, True)
    for fields in ({}, {"max_tokens": 8, "thinking_token_budget": 7}):
        await message_of(thinker, reasoning_effort="high", **fields, **form)
        thought = thought_of(thinker)
        assert (thought is None) == (not form)
        assert thought is None or thought.budget is None


async def test_a_template_may_read_the_budget(
    thinking_model: tuple[Path, Tokenizer], tmp_path: Path
) -> None:
    """As Seed-OSS's, where 0 disables reasoning."""
    budget = "{{ '<think>\n' }}{{ thinking_budget }}"
    async with edited(thinking_model[0], tmp_path, "{{ '<think>\n' }}", budget) as rig:
        rig.answer = "x"
        for fields, shown in (({"thinking_token_budget": 512}, "512"), ({}, "")):
            await message_of(rig, reasoning_effort="high", **fields)
            assert prompt_of(rig).endswith(f"<think>\n{shown}")


async def test_strict_functions_hold_calls_to_their_schemas(thinker: Rig) -> None:
    thinker.answer = f"I look. {CALL}"
    message = await message_of(thinker, reasoning_effort="none", tools=[NOW, WEATHER])
    assert (message["content"], len(message["tool_calls"])) == ("I look.", 1)
    form = thinker.submits()[-1].sampling.structured_outputs
    assert form is not None
    tag = json.loads(form.text)["format"]
    assert (tag["type"], tag["triggers"]) == ("triggered_tags", ["<tool_call>"])
    schemas = [tag["content"]["json_schema"] for tag in tag["tags"]]
    assert schemas == [{"type": "object"}, WEATHER["function"]["parameters"]]  # type: ignore[index]


async def test_strict_calls_behind_a_thought_and_without_effect(thinker: Rig) -> None:
    thinker.answer = f"hm</think>{CALL}"
    await message_of(thinker, reasoning_effort="high", tools=[WEATHER])
    assert thought_of(thinker) is not None
    await message_of(thinker, tools=[NOW])
    assert thinker.submits()[-1].sampling.structured_outputs is None
    await message_of(thinker, tools=[WEATHER], **FORMS[0])
    form = thinker.submits()[-1].sampling.structured_outputs
    assert form is not None
    assert form.json_object
