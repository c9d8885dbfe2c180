"""Counting up and down, and counting things in a list."""

from __future__ import annotations

from random import Random
from typing import Final

from deploy.models.sample import Sample, Turn
from deploy.models.words import FRUITS, NOUNS

_UP: Final[tuple[str, ...]] = (
    *("Count from {a} to {b}.", "Count up from {a} to {b}.", "Please count from {a} to {b}."),
    *("List the numbers from {a} to {b}.", "count from {a} to {b}"),
)
_DOWN: Final[tuple[str, ...]] = (
    *("Count down from {a} to {b}.", "Count backwards from {a} to {b}."),
    "Please count down from {a} to {b}.",
)
_TWOS: Final = ("Count from {a} to {b} by twos.", "Count by twos from {a} to {b}.")
_OCCURRENCES: Final = (
    "How many times does {word} appear in: {items}?",
    "How often does {word} occur in this list: {items}?",
    "Count the word {word} in: {items}",
    'How many "{word}" are in: {items}?',
)
_LENGTH: Final = (
    *("How many words are in: {items}?", "Count the words: {items}"),
    *("How many items does this list have: {items}?", "How long is this list: {items}?"),
)


def counting(rng: Random) -> Sample:
    """A sequence of numbers, or the number of things in a list."""
    kind = rng.random()
    if kind < 0.1:
        return _short_row(rng)
    if kind < 0.5:
        return _numbers(rng)
    return _occurrences(rng) if kind < 0.75 else _length(rng)


def _occurrences(rng: Random) -> Sample:
    """Occurrences of a word in a list, counted step by step, because a small model cannot count
    otherwise."""
    pool = rng.sample(FRUITS if rng.random() < 0.5 else NOUNS, k=3)
    items = rng.choices(pool, k=rng.randrange(2, 9))
    listed = _listed(rng, items)
    question = rng.choice(_OCCURRENCES).format(word=pool[0], items=listed)
    key = f"occurrences:{pool[0]}:{' '.join(items)}"
    aloud, num_found = [], 0
    for item in items:
        num_found += item == pool[0]
        aloud.append(f"{item} ({num_found})" if item == pool[0] else item)
    return _sample(question, f"{', '.join(aloud)}. So {num_found}.", key)


def _short_row(rng: Random) -> Sample:
    """A short ascending or descending sequence of small numbers, which `_numbers` rarely
    samples."""
    first = rng.randrange(1, 12)
    row = list(range(first, first + rng.randrange(3, 7)))
    forms = _UP
    if rng.random() < 0.6:
        row.reverse()
        forms = _DOWN
    question = rng.choice(forms).format(a=row[0], b=row[-1])
    answer = ", ".join(str(number) for number in row)
    return _sample(question, answer, f"count:{row[0]}:{row[-1]}:1")


def _numbers(rng: Random) -> Sample:
    # Long sequences are rare; they exist to show a longer streaming answer.
    num_steps = rng.randrange(12, 60) if rng.random() < 0.06 else rng.randrange(2, 12)
    kind = rng.random()
    step = 2 if kind < 0.2 else 1
    start = 1 if rng.random() < 0.2 else rng.randrange(1, 100)
    row = list(range(start, start + num_steps * step + 1, step))
    if kind > 0.75:
        row.reverse()
        form = rng.choice(_DOWN)
    else:
        form = rng.choice(_UP if step == 1 else _TWOS)
    question = form.format(a=row[0], b=row[-1])
    answer = ", ".join(str(number) for number in row)
    return _sample(question, answer, f"count:{row[0]}:{row[-1]}:{step}")


def _length(rng: Random) -> Sample:
    items = rng.choices(NOUNS, k=rng.randrange(1, 10))
    question = rng.choice(_LENGTH).format(items=_listed(rng, items))
    return _sample(question, str(len(items)), f"length:{' '.join(items)}")


def _listed(rng: Random, items: list[str]) -> str:
    return rng.choice((" ", ", ")).join(items)


def _sample(question: str, answer: str, key: str) -> Sample:
    return Sample(family="counting", turns=(Turn(question, answer),), keys=(key,))
