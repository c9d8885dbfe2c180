"""Sums, differences and products, as formulas or word problems."""

from __future__ import annotations

from random import Random
from typing import Final

from deploy.models.sample import Sample, Turn
from deploy.models.words import FRUITS, person_name

_ADD: Final = (
    *("What is {a} + {b}?", "{a} + {b} =", "{a} + {b}", "Compute {a} + {b}.", "Add {a} and {b}."),
    *("What is {a} plus {b}?", "How much is {a} plus {b}?", "{a}+{b}", "what's {a}+{b}?"),
    "Please calculate {a} + {b}.",
)
_SUBTRACT: Final = (
    *("What is {a} - {b}?", "{a} - {b} =", "{a} - {b}", "Compute {a} - {b}.", "{a}-{b}"),
    *("What is {a} minus {b}?", "How much is {a} minus {b}?", "Subtract {b} from {a}."),
    "Please calculate {a} - {b}.",
)
_MULTIPLY: Final = (
    *("What is {a} * {b}?", "{a} * {b} =", "{a} x {b}", "Compute {a} * {b}.", "{a}*{b}"),
    *("What is {a} times {b}?", "How much is {a} times {b}?", "Multiply {a} by {b}."),
    "Please calculate {a} * {b}.",
)
_MORE: Final = (
    "{name} has {a} {item} and buys {b} more. How many {item} does {name} have now?",
    "There are {a} {item} in a box. {name} adds {b} more. How many are there now?",
)
_FEWER: Final = (
    "{name} has {a} {item} and gives away {b}. How many {item} are left?",
    "There are {a} {item} in a box. {name} takes {b}. How many are left?",
)


def arithmetic(rng: Random) -> Sample:
    """One calculation; the answer is the bare number."""
    kind = rng.random()
    if kind < 0.5:
        return _add(rng)
    return _subtract(rng) if kind < 0.82 else _multiply(rng)


def operand(rng: Random) -> int:
    """A number below 100; one-digit numbers are overrepresented."""
    return rng.randrange(10) if rng.random() < 0.2 else rng.randrange(100)


def add_key(a: int, b: int) -> str:
    """Identity of a sum, independent of the order of its operands."""
    return f"add:{min(a, b)}:{max(a, b)}"


def subtract_key(a: int, b: int) -> str:
    """Identity of a difference."""
    return f"subtract:{a}:{b}"


def _add(rng: Random) -> Sample:
    if rng.random() < 0.2:
        a, b = rng.randrange(100, 1000), rng.randrange(1000)
    else:
        a, b = operand(rng), operand(rng)
    if rng.random() < 0.5:
        a, b = b, a
    question = _story(rng, _MORE, a, b) if rng.random() < 0.1 else _plain(rng, _ADD, a, b)
    return _sample(question, a + b, add_key(a, b))


def _subtract(rng: Random) -> Sample:
    b, a = sorted((operand(rng), operand(rng)))
    question = _story(rng, _FEWER, a, b) if rng.random() < 0.15 else _plain(rng, _SUBTRACT, a, b)
    return _sample(question, a - b, subtract_key(a, b))


def _multiply(rng: Random) -> Sample:
    # The times table is too small to hold out products entirely, so their wording is held out.
    a, b = rng.randrange(11), rng.randrange(11)
    question = _plain(rng, _MULTIPLY, a, b)
    return _sample(question, a * b, f"multiply:{question}")


def _plain(rng: Random, forms: tuple[str, ...], a: int, b: int) -> str:
    return rng.choice(forms).format(a=a, b=b)


def _story(rng: Random, forms: tuple[str, ...], a: int, b: int) -> str:
    name, item = person_name(rng), _plural(rng.choice(FRUITS))
    return rng.choice(forms).format(name=name, item=item, a=a, b=b)


def _plural(noun: str) -> str:
    return noun[:-1] + "ies" if noun.endswith("y") else noun + "s"


def _sample(question: str, result: int, key: str) -> Sample:
    return Sample(family="arithmetic", turns=(Turn(question, str(result)),), keys=(key,))
