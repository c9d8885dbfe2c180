"""Validates the values of JSON Schema keywords."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from worker.core.grammar.base import GrammarError

Json = Any

EXACT = 2**53
"""Maximum integer that is exact as a float; grammar libraries store numbers as floats."""
LARGEST = 1e15
"""Maximum non-integer number in `const` and bounds; beyond it, floats may lose their fractions."""
SMALLEST = 1e-15
"""Minimum positive number in `const` and bounds."""


def unsupported(keyword: str, detail: str) -> GrammarError:
    """Error that names a keyword that grammars cannot enforce."""
    return GrammarError(f"JSON schema: '{keyword}' {detail}")


def malformed(keyword: str, expected: str, value: Json) -> GrammarError:
    """Error for a keyword whose value is not valid JSON Schema."""
    return GrammarError(f"JSON schema: '{keyword}' must be {expected}, got {json.dumps(value):.80}")


def an_array(given: Mapping[str, Json], keyword: str) -> list[Json]:
    """Value of a keyword. Raises GrammarError if it is not an array."""
    value = given[keyword]
    if not isinstance(value, list):
        raise malformed(keyword, "an array", value)
    return value


def an_object(given: Mapping[str, Json], keyword: str) -> dict[str, Json]:
    """Value of a keyword. Raises GrammarError if it is not an object."""
    value = given[keyword]
    if not isinstance(value, dict):
        raise malformed(keyword, "an object", value)
    return value


def texts(given: Mapping[str, Json], keyword: str) -> list[str]:
    """Value of a keyword. Raises GrammarError if it is not an array of strings."""
    value = given[keyword]
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise malformed(keyword, "an array of strings", value)
    return value


def count(given: Mapping[str, Json], keyword: str) -> int | None:
    """Value of a keyword; None if absent. Raises GrammarError unless it is a non-negative
    integer."""
    if keyword not in given:
        return None
    value = given[keyword]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or value < 0 or value != math.floor(value):
        raise malformed(keyword, "a non-negative integer", value)
    return int(value)


def checked_value(value: Json, keyword: str) -> Json:
    """Value of `const` or `enum` in a form that grammars can generate: 1.0 becomes 1.

    Raises:
        GrammarError: a number is too large or too small, or a text has an unpaired surrogate or a
            control character that JSON can only represent as a code point escape.
    """
    if isinstance(value, list):
        return [checked_value(item, keyword) for item in value]
    if isinstance(value, dict):
        return {
            checked_value(name, keyword): checked_value(item, keyword)
            for name, item in value.items()
        }
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise unsupported(keyword, "with an unpaired surrogate is not supported") from None
        check_writable(value, keyword)
        return value
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and abs(value) > EXACT:
        raise unsupported(keyword, f"with the number {value} is not supported: it is too large")
    if isinstance(value, float) and not SMALLEST <= abs(value) <= LARGEST:
        raise unsupported(keyword, f"with the number {value} is not supported")
    return value


def check_writable(text: str, keyword: str) -> None:
    """Raises GrammarError for control characters that JSON can only represent as code point
    escapes."""
    if any(character < " " and character not in "\b\t\n\f\r" for character in text):
        raise unsupported(keyword, f"with the control characters of {text!r} is not supported")
