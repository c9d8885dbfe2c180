"""The committed demo checkpoint: format, held-out data, accuracy."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from deploy.models.corpus import (
    Question,
    heldout_questions,
    messages_of,
    read_questions,
    training_conversations,
    training_sample,
)
from deploy.models.evaluate import accuracy_by_family
from deploy.models.sample import is_heldout_key
from deploy.models.tokenizer import segments
from tests.support.effort import IS_LONG, cases
from tests.support.paths import MODELS

DEMO = MODELS / "demo"
MB = 1_000_000


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = PreTrainedTokenizerFast.from_pretrained(DEMO)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return read_questions(MODELS / "demo_heldout.jsonl")


def test_sizes_stay_within_limits() -> None:
    assert (DEMO / "model.safetensors").stat().st_size <= 14 * MB
    assert sum(path.stat().st_size for path in MODELS.glob("*/*.safetensors")) <= 24 * MB


def test_questions_are_the_ones_the_generator_holds_out(questions: list[Question]) -> None:
    assert questions == heldout_questions()
    assert len({str(question.messages) for question in questions}) == 200


def test_training_never_draws_a_heldout_instance(questions: list[Question]) -> None:
    asked = {str(question.messages) for question in questions}
    rng = Random(7)
    for sample in (training_sample(rng) for _ in range(2000)):
        assert not any(is_heldout_key(key) for key in sample.keys)
        *messages, _ = messages_of(sample.turns)
        assert str(tuple(messages)) not in asked


def test_same_seed_gives_the_same_conversations() -> None:
    first, second = (list(islice(training_conversations(Random(3)), 100)) for _ in range(2))
    assert first == second


def test_digits_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("4821 + 07") == ["4", "8", "2", "1", "Ġ+", "Ġ", "0", "7"]
    multi_digit = [t for t in tokenizer.get_vocab() if len(t) > 1 and any(c.isdigit() for c in t)]
    assert multi_digit == []


def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    text = 'Grüße, 世界! 🙂\n\t{"a": 12}  <b>'
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_gives_the_tokens_of_training(tokenizer: PreTrainedTokenizerFast) -> None:
    for conversation in islice(training_conversations(Random(11)), 100):
        messages = messages_of(conversation.turns, conversation.system)
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        pieces = [tokenizer.encode(text) for text, _ in segments(conversation)]
        assert tokenizer.encode(rendered) == [token for piece in pieces for token in piece]


def test_chat_template_prompts_for_an_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
    ]
    prompt = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tokenizer_loads_without_torch() -> None:
    script = (
        "import sys; from transformers import PreTrainedTokenizerFast as T;"
        f"t = T.from_pretrained({str(DEMO)!r});"
        "t.apply_chat_template([{'role': 'user', 'content': 'hi'}], tokenize=False);"
        "assert t.eos_token == '<|im_end|>'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_demo_answers_the_heldout_questions(questions: list[Question]) -> None:
    torch.set_num_threads(1)
    some = questions[:: len(questions) // cases(len(questions))]
    accuracy = accuracy_by_family(DEMO, some)
    least = (0.90, 0.75) if IS_LONG else (0.85, 0.6)  # two of five answers may be wrong
    assert accuracy.pop("overall") >= least[0], accuracy
    assert len(accuracy) == 8
    assert min(accuracy.values()) >= least[1], accuracy
