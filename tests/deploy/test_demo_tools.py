"""Second phase of the demo: chat template, held-out tools, accuracy of calls."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from deploy.models.calling import (
    Exchange,
    heldout_exchange,
    messages_of_exchange,
    tool_conversations,
    tool_questions,
    written_calls,
    written_tools,
)
from deploy.models.corpus import (
    Conversation,
    Question,
    messages_of,
    read_questions,
    training_conversations,
)
from deploy.models.evaluate import accuracies, after_thought, answers
from deploy.models.functions import Function
from deploy.models.tokenizer import (
    CHAT_TEMPLATE,
    MARKERS,
    THOUGHT_END,
    TOOL_TEMPLATE,
    save_tokenizer,
    segments,
    train_tokenizer,
)
from router.parsers.dialect import dialect_of
from tests.support.effort import IS_LONG, cases
from tests.support.paths import MODELS
from worker.protocol.text.tokenizer import load_tokenizer

DEMO = MODELS / "demo"
FAMILIES = {"single": 40, "parallel": 15, "none": 20, "result": 25}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer trained on a few texts."""
    folder = tmp_path_factory.mktemp("tokenizer")
    conversations = islice(training_conversations(Random(1)), 300)
    texts = (text for one in conversations for text, _ in segments(one))
    save_tokenizer(train_tokenizer(texts, 800, MARKERS), folder, 4096, TOOL_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def exchanges(count: int) -> list[tuple[tuple[Function, ...], Exchange]]:
    rng = Random(4)
    families = ("single", "parallel", "none")
    return [heldout_exchange(rng, families[n % 3]) for n in range(count)]


def test_template_gives_the_tokens_of_training(tokenizer: PreTrainedTokenizerFast) -> None:
    for number, (functions, exchange) in enumerate(exchanges(60)):
        system = ["Be brief."] if number % 2 else []
        messages: list[Any] = [
            *({"role": "system", "content": text} for text in system),
            {"role": "user", "content": exchange.question},
            *(messages_of_exchange(exchange) if exchange.calls else ()),
            {"role": "assistant", "content": exchange.answer},
        ]
        rendered = tokenizer.apply_chat_template(
            messages, tools=[f.declared() for f in functions], tokenize=False
        )
        system_text = "\n\n".join((*system, written_tools(functions)))
        pieces = list(segments(Conversation(system=system_text, turns=exchange.turns())))
        assert rendered == "".join(text for text, _ in pieces)
        tokens = [token for text, _ in pieces for token in tokenizer.encode(text)]
        assert tokenizer.encode(rendered) == tokens


def test_template_changes_nothing_of_chats_without_functions(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    for conversation in islice(training_conversations(Random(11)), 50):
        messages = messages_of(conversation.turns, conversation.system)
        for prompts in (False, True):
            options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": prompts}
            new = tokenizer.apply_chat_template(messages, **options)
            plain = tokenizer.apply_chat_template(messages, chat_template=CHAT_TEMPLATE, **options)
            assert new == plain


def test_reasoning_is_opened_if_requested(tokenizer: PreTrainedTokenizerFast) -> None:
    taught = [c for c in islice(tool_conversations(Random(2)), 400) if c.thought is not None]
    assert len(taught) > 10
    for conversation in taught:
        *_, (user_texts, _), (answer, _), _ = segments(conversation)
        assert user_texts.endswith("<|im_start|>assistant\n<think>\n")
        assert answer.startswith(f"{conversation.thought}\n</think>\n\n")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=True,
    )
    assert str(prompt).endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize(
    ("parameters", "shown"),
    [
        (None, "{}"),
        ({"type": "object"}, "{}"),
        (
            {"properties": {"a": {"type": "number"}, "b": {"type": "boolean"}}},
            '{"a"?: 0, "b"?: false}',
        ),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, '{"a"?: ""}'),
        ({"properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]}, '{"a": ""}'),
        ({"properties": {"a": True, "b": {"type": "array"}}}, '{"a"?: "", "b"?: []}'),
    ],
)
def test_template_takes_any_schema(
    tokenizer: PreTrainedTokenizerFast, parameters: Any, shown: str
) -> None:
    function = {"name": "f", "parameters": parameters, "description": "Says.\n\nArgs: none"}
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        tools=[{"type": "function", "function": function}],
        tokenize=False,
    )
    assert f"<tools>\nf {shown}: Says.\n</tools>" in prompt
    assert "Args" not in prompt


def test_the_router_finds_calls_and_thoughts(folder: Path) -> None:
    dialect = dialect_of(load_tokenizer(str(folder)))
    assert dialect.tools is not None
    assert dialect.tools.name == dialect.forced.name == "hermes"
    assert dialect.thoughts is not None
    assert dialect.thought_tokens is not None


@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_the_demo_template_renders_functions(name: str) -> None:
    """Markers of calls and thoughts are tokens of the committed checkpoints, too."""
    loaded = load_tokenizer(str(MODELS / name))
    assert dialect_of(loaded).thought_tokens is not None
    assert all(loaded.token_id(marker) is not None for marker in MARKERS)
    assert (MODELS / name / "chat_template.jinja").read_text() == TOOL_TEMPLATE


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return read_questions(MODELS / "demo_heldout_tools.jsonl")


def test_questions_are_the_ones_the_generator_holds_out(questions: list[Question]) -> None:
    assert questions == tool_questions()


def test_the_demo_calls_functions(questions: list[Question]) -> None:
    torch.set_num_threads(1)
    some = questions[:: len(questions) // cases(len(questions))]
    given = answers(DEMO, some)
    broken = [text for text in given if not _has_whole_calls(text)]
    assert len(broken) <= 0.01 * len(given), broken
    accuracy = accuracies(some, given)
    assert accuracy.pop("overall") >= 0.8, accuracy
    assert min(accuracy[family] for family in ("none", "result")) >= 0.9, accuracy
    if IS_LONG:
        calls = sum(accuracy[family] * FAMILIES[family] for family in ("single", "parallel"))
        assert calls >= 0.85 * (FAMILIES["single"] + FAMILIES["parallel"]), accuracy


def _has_whole_calls(text: str) -> bool:
    try:
        for call in text.split("<tool_call>")[1:]:
            json.loads(call.removesuffix("\n").removesuffix("</tool_call>"))
    except json.JSONDecodeError:
        return False
    return True


def test_its_thoughts_are_short(questions: list[Question]) -> None:
    torch.set_num_threads(1)
    for text in answers(DEMO, questions[:: len(questions) // cases(25)], thinking=True):
        thought = text.removesuffix(after_thought(text))
        assert thought.endswith(THOUGHT_END)
        assert 0 < len(thought) < 200


def test_markers_are_tokens_and_part_of_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 800
    ids = tokenizer.encode("".join(MARKERS))
    assert len(ids) == len(MARKERS)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(MARKERS)


def test_training_never_draws_a_heldout_call() -> None:
    questions = tool_questions()
    assert questions == tool_questions()
    families = [question.family for question in questions]
    assert {family: families.count(family) for family in FAMILIES} == FAMILIES
    user_texts = {
        str(q.messages[0]["content"]) for q in questions if q.family in ("single", "parallel")
    }
    for conversation in islice(tool_conversations(Random(6)), 1500):
        if conversation.system is not None and "<tools>" in conversation.system:
            assert user_texts.isdisjoint(turn.user for turn in conversation.turns)


def test_calls_are_of_what_is_declared() -> None:
    for functions, exchange in exchanges(60):
        declared = {f.name: f.declared()["function"]["parameters"] for f in functions}
        for call in exchange.calls:
            schema = declared[call.name]
            assert set(schema["required"]) <= set(call.arguments) <= set(schema["properties"])
        written = [json.loads(line) for line in written_calls(exchange.calls).split("\n")[1::3]]
        assert written == [call._asdict() for call in exchange.calls]
