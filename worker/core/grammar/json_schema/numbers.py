"""Rewrites the keywords of JSON Schema for numbers, such as `minimum` and `multipleOf`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from worker.core.grammar.json_schema.values import (
    EXACT,
    LARGEST,
    SMALLEST,
    malformed,
    unsupported,
)

Json = Any

_MAX_DIVISOR = 10**6
_MIN_DIVISOR = 2.0**-9
_DIGITS = 11
"""Maximum number of digits, before and after the decimal point, of numbers that are valid near an
excluded bound. Floats distinguish up to 15 digits, and llguidance supports multiples of at least
1e-10."""


def _num_digits(bound: Json) -> int:
    return len(str(int(abs(bound))))


class Numbers(NamedTuple):
    """Rewritten keywords for numbers."""

    keywords: dict[str, Json]
    is_integer: bool
    """Whether only integers are valid."""


def rewritten(given: Mapping[str, Json], *, is_integer: bool) -> Numbers | None:
    """Rewrites the keywords for numbers in a schema; returns None if no number is valid.

    Args:
        given: the schema.
        is_integer: whether only integers are valid.

    Raises:
        GrammarError: a keyword is malformed or cannot be enforced.
    """
    low, low_is_open = _bound(given, "minimum", "exclusiveMinimum", max)
    high, high_is_open = _bound(given, "maximum", "exclusiveMaximum", min)
    keywords: dict[str, Json] = {}
    divisor = _number(given, "multipleOf")
    if divisor is not None:
        divides_integers = _divisor(divisor)
        is_integer = is_integer or divides_integers
        if is_integer and not divides_integers:
            divisor = 1  # a power of two less than 1
        if divisor != 1:
            keywords["multipleOf"] = int(divisor) if divides_integers else divisor
    if is_integer:
        low, high = _integers(low, low_is_open, high, high_is_open)
    else:
        low, high = _floats(low, high)
    names = ("minimum", "maximum")
    if not is_integer:
        # Numbers near an excluded bound must not be rounded to it: limit their decimal places.
        nearest = [
            bound for bound, is_open in ((low, low_is_open), (high, high_is_open)) if is_open
        ]
        if nearest and "multipleOf" not in keywords:
            places = max(0, _DIGITS - max(map(_num_digits, nearest)))
            keywords["multipleOf"] = float(f"1e-{places}")
        names = (
            "exclusiveMinimum" if low_is_open else "minimum",
            "exclusiveMaximum" if high_is_open else "maximum",
        )
        if low is not None and low == high and (low_is_open or high_is_open):
            return None
    if low is not None and high is not None and low > high:
        return None
    keywords.update({n: b for n, b in zip(names, (low, high), strict=True) if b is not None})
    return Numbers(keywords, is_integer)


def _number(given: Mapping[str, Json], keyword: str) -> Json:
    value = given.get(keyword)
    if value is None and keyword not in given:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value
    raise malformed(keyword, "a number", value)


def _bound(given: Mapping[str, Json], closed: str, opened: str, choose: Any) -> tuple[Json, bool]:
    """The stricter of two bounds, and whether it is exclusive."""
    bound = _number(given, closed)
    excluded = given.get(opened)
    if isinstance(excluded, bool):  # as in draft 4
        return bound, excluded and bound is not None
    excluded = _number(given, opened)
    if excluded is None:
        return bound, False
    if bound is None or choose(excluded, bound) == excluded:
        return excluded, True
    return bound, False


def _divisor(divisor: Json) -> bool:
    """Whether multiples of a divisor are integers.

    Raises:
        GrammarError: validators disagree on which numbers are multiples: 0.07 / 0.01 is not 7 in
            floats.
    """
    if divisor <= 0:
        raise malformed("multipleOf", "greater than 0", divisor)
    if divisor == math.floor(divisor):
        if divisor > _MAX_DIVISOR:
            raise unsupported("multipleOf", f"is only supported up to {_MAX_DIVISOR}")
        return True
    if Fraction(divisor).numerator != 1 or divisor < _MIN_DIVISOR:
        raise unsupported(
            "multipleOf", "is only supported for integers and powers of 1/2: others are not exact"
        )
    return False


def _integers(low: Json, low_is_open: bool, high: Json, high_is_open: bool) -> tuple[Json, Json]:
    if low is not None:
        low = math.floor(low) + 1 if low_is_open else math.ceil(low)
        low = _within(low, "minimum")
    if high is not None:
        high = math.ceil(high) - 1 if high_is_open else math.floor(high)
        high = _within(high, "maximum")
    return low, high


def _within(bound: int, keyword: str) -> int | None:
    """Integer bound that is exact as a float and at least as strict as `bound`. Raises GrammarError
    if `bound` is too large for that."""
    is_minimum = keyword == "minimum"
    if abs(bound) <= EXACT:
        return bound
    if (bound < 0) is is_minimum:  # a wide range such as int64: exclude values beyond it
        return -EXACT if is_minimum else EXACT
    raise unsupported(keyword, f"{bound} is not supported: it is too large")


def _floats(low: Json, high: Json) -> tuple[Json, Json]:
    if low is not None:
        if 0 < low < SMALLEST:
            low = SMALLEST
        elif -SMALLEST < low < 0:
            low = 0
        low = _in_range(low, "minimum")
    if high is not None:
        if -SMALLEST < high < 0:
            high = -SMALLEST
        elif 0 < high < SMALLEST:
            high = 0
        high = _in_range(high, "maximum")
    return low, high


def _in_range(bound: Json, keyword: str) -> Json:
    is_minimum = keyword == "minimum"
    if abs(bound) <= LARGEST:
        return bound
    if (bound < 0) is is_minimum:
        return -LARGEST if is_minimum else LARGEST
    raise unsupported(keyword, f"{bound} is not supported: it is too large")
