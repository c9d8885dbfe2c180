"""Questions and answers of /v1/systemone, TypeSafe's System One API."""

from __future__ import annotations

import json
import string
from typing import Any

from router.api.decisions.protocol import MAX_CHOICES, MAX_LEVELS, SystemOneQuestion
from router.api.decisions.questions import Option, Question, Reading
from router.errors import ApiError, bad_request


def state_of(given: Any) -> str:
    """The state as text."""
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def question_of(name: str, given: SystemOneQuestion) -> Question:
    """Converts a question to the form in which the model reads it.

    Raises:
        ApiError: 400 for an empty id, or criteria that do not fit the type.
    """
    if not name:
        raise bad_request("the id of a question must not be empty", "questions")
    instructions, criteria = given.instructions or "", given.criteria
    if given.type == "choice":
        if not isinstance(criteria, dict) or not 1 <= len(criteria) <= MAX_CHOICES:
            expected = f"map 1 to {MAX_CHOICES} options to descriptions or null"
            raise _wrong(name, expected)
        options = [Option(option, text or "") for option, text in criteria.items()]
        return Question(instructions, options)
    if given.type == "noul":
        if not isinstance(criteria or {}, dict) or not {*(criteria or ())} <= {"true", "false"}:
            raise _wrong(name, "be null, or have descriptions of true and false")
        texts = criteria if isinstance(criteria, dict) else {}
        return Question(
            instructions,
            [Option("", texts.get("true") or ""), Option("", texts.get("false") or "")],
            labels=("yes", "no"),
            aliases=("Yes", "No"),
            reply="yes or no",
        )
    if not isinstance(criteria, list) or not 2 <= len({*criteria}) == len(criteria) <= MAX_LEVELS:
        raise _wrong(name, f"be a list of 2 to {MAX_LEVELS} distinct levels")
    levels = [Option(level) for level in criteria]
    return Question(instructions, levels, string.digits, reply="the number of one level")


def answer(given: SystemOneQuestion, reading: Reading) -> dict[str, Any]:
    """The answer to a question, in the format of /v1/systemone."""
    values, chosen = reading.probabilities, dict[str, Any]()
    criteria = given.criteria or ()
    if given.type == "noul":
        names, chosen = ["yes", "no"], {"noul": values[0]}
    elif given.type == "choice":
        names = list(criteria)
        chosen = {"choice": names[reading.best]}
    else:
        names = [str(level) for level in range(len(criteria))]
        chosen = {"score": reading.mean, "legend": dict(zip(names, criteria, strict=True))}
    return {
        "type": given.type,
        **chosen,
        "probabilities": dict(zip(names, values, strict=True)),
        "confidence": reading.confidence,
    }


def diagnostics(reading: Reading) -> dict[str, Any]:
    """Fields that show how likely the model was to reply with a label."""
    return {"label_mass": reading.label_mass, "argmax_is_label": reading.argmax_is_label}


def _wrong(name: str, expected: str) -> ApiError:
    return bad_request(f"criteria of question {name!r:.80} must {expected}", "questions")
