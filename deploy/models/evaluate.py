"""Greedy accuracy on held-out questions: ``python -m deploy.models.evaluate DIRECTORY``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from cluster.cli.parser import CommandParser
from deploy.models.corpus import (
    Question,
    first_words_path,
    questions_path,
    read_questions,
    tool_questions_path,
)
from deploy.models.tokenizer import THOUGHT_END

_BATCH_SIZE: Final = 50
_MAX_NEW_TOKENS: Final = 256


def main() -> None:
    """Prints the accuracy per family and the wrong answers."""
    parser = CommandParser(description=__doc__, prog="python -m deploy.models.evaluate")
    parser.add_argument(
        "directory", type=Path, help="checkpoint folder; its questions must be next to it"
    )
    parser.add_argument(
        "--thinking", action="store_true", help="generate reasoning before each answer"
    )
    parser.add_argument(
        "--first-words",
        action="store_true",
        help="use typical first messages instead (out-of-scope messages, lists to sort)",
    )
    args = parser.parse_args()
    directory = args.directory
    if args.first_words:
        questions = read_questions(first_words_path(directory))
    else:
        questions = read_questions(questions_path(directory))
        with_tools = tool_questions_path(directory)
        questions += read_questions(with_tools) if with_tools.exists() else []
    given = answers(directory, questions, thinking=args.thinking)
    for question, text in zip(questions, given, strict=True):
        if after_thought(text) != question.answer:
            prompt = question.messages[-1]["content"]
            print(f"{question.id}: {prompt!r} -> {text!r}, expected {question.answer!r}")
    for family, accuracy in accuracies(questions, given).items():
        print(f"{family:12} {accuracy:.3f}")


def accuracy_by_family(directory: Path, questions: list[Question]) -> dict[str, float]:
    """`accuracies` of the checkpoint's greedy answers, without reasoning."""
    return accuracies(questions, answers(directory, questions))


def accuracies(questions: list[Question], given: list[str]) -> dict[str, float]:
    """Fraction of exactly correct answers by family, and ``overall``."""
    right: dict[str, list[bool]] = defaultdict(list)
    for question, text in zip(questions, given, strict=True):
        is_right = after_thought(text) == question.answer
        right[question.family].append(is_right)
        right["overall"].append(is_right)
    return {family: sum(flags) / len(flags) for family, flags in right.items()}


def after_thought(text: str) -> str:
    """The answer in a text that may begin with reasoning."""
    return text.rpartition(THOUGHT_END)[2]


def answers(directory: Path, questions: list[Question], *, thinking: bool = False) -> list[str]:
    """The checkpoint's greedy answers in fp32, in the order of the questions.

    With ``thinking``, each text begins with reasoning.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, padding_side="left")
    # No transformers class satisfies the protocol that types `generate`.
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    # Questions of similar length share a batch, because padding costs as much as text.
    order = sorted(range(len(questions)), key=lambda index: len(questions[index].answer))
    given = _generate(model, tokenizer, [questions[index] for index in order], thinking)
    by_index = dict(zip(order, given, strict=True))
    return [by_index[index] for index in range(len(questions))]


def _generate(
    model: Any, tokenizer: PreTrainedTokenizerFast, questions: list[Question], thinking: bool
) -> Iterator[str]:
    for start in range(0, len(questions), _BATCH_SIZE):
        prompts = [
            tokenizer.apply_chat_template(
                list(question.messages),
                tools=list(question.tools) or None,
                enable_thinking=thinking,
                add_generation_prompt=True,
                tokenize=False,
            )
            for question in questions[start : start + _BATCH_SIZE]
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=_MAX_NEW_TOKENS)
        new_tokens = output[:, inputs["input_ids"].shape[1] :]
        yield from tokenizer.batch_decode(new_tokens, skip_special_tokens=True)


if __name__ == "__main__":
    main()
