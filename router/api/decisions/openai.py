"""Questions and answers of /v1/decisions, OpenAI's Decisions API."""

from __future__ import annotations

import json
from typing import Any

from router.api.decisions.protocol import (
    Choice,
    Content,
    InputMessage,
    Predicate,
    Score,
    TextPart,
)
from router.api.decisions.questions import Option, Question, Reading
from router.errors import bad_request


def state_of(given: str | list[InputMessage]) -> str:
    """The input as text. Raises ApiError (400) if it is an empty list."""
    if isinstance(given, str):
        return given
    if not given:
        raise bad_request("input must have at least one message", "input")
    return "\n\n".join(_text(message.content) for message in given)


def question_of(given: Predicate | Choice | Score) -> Question:
    """Converts a question to the form in which the model reads it. Raises ApiError (400) if choices
    are not distinct."""
    instructions = _text(given.instructions)
    if isinstance(given, Predicate):
        return Question(instructions, [Option("true"), Option("false")])
    if isinstance(given, Score):
        levels = [Option(level.label, level.description or "") for level in given.levels]
        return Question(instructions, levels)
    values = [(type(option.value), option.value) for option in given.choices]
    if len({*values}) < len(values):
        raise bad_request("the choices of a question must be distinct", "questions")
    return Question(
        instructions,
        [Option(_shown(option.value), option.description or "") for option in given.choices],
    )


def answer(given: Predicate | Choice | Score, reading: Reading) -> dict[str, Any]:
    """The answer to a question, in the format of /v1/decisions."""
    if isinstance(given, Predicate):
        probability = reading.probabilities[0]
        return {"type": "predicate", "name": given.name, "probability": probability}
    if isinstance(given, Choice):
        chosen: dict[str, Any] = {"choice": given.choices[reading.best].value}
        options: list[dict[str, Any]] = [{"value": option.value} for option in given.choices]
    else:
        chosen = {"score": reading.mean}
        options = [
            {"value": index, "label": level.label} for index, level in enumerate(given.levels)
        ]
    return {
        "type": "choice" if isinstance(given, Choice) else "score",
        "name": given.name,
        **chosen,
        "probabilities": [
            {**option, "probability": probability}
            for option, probability in zip(options, reading.probabilities, strict=True)
        ],
        "confidence": reading.confidence,
    }


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(
        part.text if isinstance(part, TextPart) else json.dumps(part.data, ensure_ascii=False)
        for part in content
    )


def _shown(value: str | bool) -> str:
    """A choice as JSON, which distinguishes strings from booleans."""
    return json.dumps(value, ensure_ascii=False)
