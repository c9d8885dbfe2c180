"""Checks the values of keywords."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from worker.core.grammar.base import GrammarError

Json = Any

EXACT = 2**53
"""Integers up to this one are exact as floats, which grammar libraries hold numbers in."""
LARGEST = 1e15
"""Largest number that is not an integer in `const` and bounds: in floats beyond it, fractions are
rounded away."""
SMALLEST = 1e-15
"""Smallest positive one."""


def unsupported(keyword: str, detail: str) -> GrammarError:
    """An error that names a keyword which grammars cannot enforce."""
    return GrammarError(f"JSON schema: {keyword} {detail}")


def an_array(given: Mapping[str, Json], keyword: str) -> list[Json]:
    """Value of a keyword. Raises GrammarError if it is no array."""
    value = given[keyword]
    if not isinstance(value, list):
        raise GrammarError(f"{keyword} must be an array")
    return value


def an_object(given: Mapping[str, Json], keyword: str) -> dict[str, Json]:
    """Value of a keyword. Raises GrammarError if it is no object."""
    value = given[keyword]
    if not isinstance(value, dict):
        raise GrammarError(f"{keyword} must be an object")
    return value


def texts(given: Mapping[str, Json], keyword: str) -> list[str]:
    """Value of a keyword. Raises GrammarError if it is no array of strings."""
    value = given[keyword]
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise GrammarError(f"{keyword} must be an array of strings")
    return value


def count(given: Mapping[str, Json], keyword: str) -> int | None:
    """Value of a keyword; None if it is absent. Raises GrammarError if it is no count."""
    if keyword not in given:
        return None
    value = given[keyword]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or value < 0 or value != math.floor(value):
        raise GrammarError(f"{keyword} must be an integer from 0 on, not {value!r}")
    return int(value)


def checked_value(value: Json, keyword: str) -> Json:
    """A value of `const` or `enum` as grammars can write it: 1.0 is 1.

    Raises:
        GrammarError: a number is too large, or a text is not Unicode.
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
    """Raises GrammarError for control characters that JSON has only as escapes of code points."""
    if any(character < " " and character not in "\b\t\n\f\r" for character in text):
        raise unsupported(keyword, f"with the control characters of {text!r} is not supported")
