"""Reversed and sorted lists."""

from __future__ import annotations

from random import Random
from string import ascii_lowercase
from typing import Final

from deploy.models.sample import Sample, Turn
from deploy.models.tasks.topics import WORDS
from deploy.models.words import ANIMALS, COLORS, FRUITS, NAMES, NOUNS, TOWNS, invented_word

REVERSE_WORDS: Final[tuple[str, ...]] = (
    *("Reverse the words: {x}", "Reverse this list: {x}", "Reverse: {x}", "reverse {x}"),
    *("Say these words in reverse order: {x}", "Write this list backwards: {x}"),
)
_REVERSE_DIGITS: Final[tuple[str, ...]] = (
    *("Reverse {x}", "Reverse the digits of {x}.", "Write {x} backwards.", "Reverse: {x}"),
    "What is {x} reversed?",
)
_REVERSE_LETTERS: Final[tuple[str, ...]] = (
    "Reverse the letters: {x}",
    "Reverse: {x}",
    "Write backwards: {x}",
)
SORT_WORDS: Final[tuple[str, ...]] = (
    *("Sort these words: {x}", "Sort alphabetically: {x}", "Sort: {x}", "sort {x}"),
    *("Put these words in alphabetical order: {x}", "Please sort the list: {x}"),
)
_SORT_UP: Final[tuple[str, ...]] = (
    *("Sort these numbers: {x}", "Sort from small to large: {x}", "Sort: {x}"),
    "Put these numbers in order: {x}",
)
_SORT_DOWN: Final[tuple[str, ...]] = (
    "Sort from large to small: {x}",
    "Sort these numbers in descending order: {x}",
)
_SORT_ANY: Final[tuple[str, ...]] = (
    *("Sort the following words alphabetically: {x}", "Sort this list: {x}", "Sort these: {x}"),
    *("Can you sort these words? {x}", "Please sort {x}", "Sort {x}", "Sort {x}.", "sort: {x}"),
    *("Sort alphabetically:\n{x}", "Order these words: {x}", "Alphabetize: {x}", "Sort:\n{x}"),
)
_SORT_ANY_NUMBERS: Final[tuple[str, ...]] = (
    *("Sort {x}", "sort {x}", "Sort this list: {x}", "Sort these: {x}", "Order these numbers: {x}"),
    *("Please sort {x}", "Sort {x} in ascending order.", "Sort in ascending order: {x}"),
    *("Can you sort these numbers? {x}", "sort these numbers from small to large: {x}"),
)


def reversing(rng: Random) -> Sample:
    """Words, digits or letters in reverse order."""
    kind = rng.random()
    if kind < 0.5:
        items, separator = _words(rng, rng.randrange(2, 7)), separator_of(rng)
        forms = REVERSE_WORDS
    elif kind < 0.8:
        items, separator = rng.choices("0123456789", k=rng.randrange(2, 8)), ""
        forms = _REVERSE_DIGITS
    else:
        items, separator = rng.choices(ascii_lowercase, k=rng.randrange(3, 8)), " "
        forms = _REVERSE_LETTERS
    question = rng.choice(forms).format(x=separator.join(items))
    answer = separator.join(reversed(items))
    key = f"reverse:{separator.join(items)}"
    return Sample(family="reversing", turns=(Turn(question, answer),), keys=(key,))


def sorting(rng: Random) -> Sample:
    """Words in alphabetical order, or numbers by size."""
    separator = separator_of(rng)
    if rng.random() < 0.65:
        items = rng.sample(NOUNS, k=rng.randrange(2, 6))
        ordered, forms = sorted(items), SORT_WORDS
    else:
        numbers = rng.sample(range(100), k=rng.randrange(2, 6))
        descending = rng.random() < 0.3
        items = [str(number) for number in numbers]
        ordered = [str(number) for number in sorted(numbers, reverse=descending)]
        forms = _SORT_DOWN if descending else _SORT_UP
    question = rng.choice(forms).format(x=separator.join(items))
    turn = Turn(question, separator.join(ordered))
    return Sample(family="sorting", turns=(turn,), keys=(f"sort:{' '.join(items)}",))


def sorting_any(rng: Random) -> Sample:
    """Sorting of arbitrary words, in other wordings, and with lists in brackets."""
    if rng.random() < 0.4:
        return sorting(rng)
    separator = "\n" if rng.random() < 0.08 else rng.choice((" ", ", ", ", "))
    count = rng.choice((2, 3, 3, 4, 4, 5))
    if rng.random() < 0.6:
        items = _distinct(_any_words(rng, count))
        ordered = sorted(items, key=str.lower)
        forms = SORT_WORDS + _SORT_ANY
    else:
        numbers = rng.sample(range(rng.choice((10, 100, 100, 100, 1000))), k=count)
        items = [str(number) for number in numbers]
        ordered = [str(number) for number in sorted(numbers)]
        forms = _SORT_UP + _SORT_ANY_NUMBERS
    key = f"sort:{' '.join(items)}"
    asked, answer = separator.join(items), separator.join(ordered)
    if separator == ", " and rng.random() < 0.12:
        asked, answer = f"[{asked}]", f"[{answer}]"
    turn = Turn(rng.choice(forms).format(x=asked), answer)
    return Sample(family="sorting", turns=(turn,), keys=(key,))


def separator_of(rng: Random) -> str:
    """Separators of the items of a list."""
    return rng.choice((" ", ", "))


def _words(rng: Random, count: int) -> list[str]:
    kind = rng.random()
    if kind < 0.1:
        return [invented_word(rng) for _ in range(count)]
    return rng.choices(NAMES if kind < 0.25 else NOUNS, k=count)


def _any_words(rng: Random, count: int) -> list[str]:
    """Words of one kind, or of several."""
    pools = (NAMES, TOWNS, ANIMALS, COLORS, FRUITS, NOUNS, WORDS, NOUNS + WORDS + ANIMALS + FRUITS)
    words = rng.sample(rng.choice(pools), k=count)
    if rng.random() < 0.1:
        words = [word.capitalize() for word in words]
    if rng.random() < 0.08:
        words[0] = invented_word(rng)
    return words


def _distinct(words: list[str]) -> list[str]:
    """The words without those that differ from an earlier one only in case."""
    return list({word.lower(): word for word in words}.values())
