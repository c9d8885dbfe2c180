"""Reversed and sorted lists."""

from __future__ import annotations

from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Final

from deploy.models.sample import Sample, Turn
from deploy.models.tasks.topics import WORDS
from deploy.models.words import NAMES, NOUNS, TOWNS, invented_word, words_of

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
    *("Sort {x} alphabetically.", "sort these words: {x}", "Sort the words: {x}"),
    *("Sort these words alphabetically: {x}", "Sort the list: {x}", "Can you sort {x}?"),
    *("Sort these {kind}: {x}", "sort these {kind} alphabetically: {x}"),
)
_SORT_ANY_NUMBERS: Final[tuple[str, ...]] = (
    *("Sort {x}", "sort {x}", "Sort this list: {x}", "Sort these: {x}", "Order these numbers: {x}"),
    *("Please sort {x}", "Sort {x} in ascending order.", "Sort in ascending order: {x}"),
    *("Can you sort these numbers? {x}", "sort these numbers from small to large: {x}"),
)
_EVERYDAY: Final = tuple(
    (kind, words_of(words))
    for kind, _, words in (
        line.partition(": ")
        for line in Path(__file__).with_name("everyday.txt").read_text("utf-8").splitlines()
    )
)
"""Words that people sort, preceded by the name of their kind."""
_KIND_WEIGHTS: Final = tuple(len(words) for _, words in _EVERYDAY)
_ALL_WORDS: Final = tuple(
    sorted({*NOUNS, *WORDS, *NAMES, *TOWNS, *(w for _, words in _EVERYDAY for w in words)})
)
_SPELLINGS: Final = tuple(sorted({word.lower() for word in _ALL_WORDS}))
_BY_LETTER: Final = tuple(
    words
    for letter in ascii_lowercase
    if len(words := tuple(word for word in _SPELLINGS if word[0] == letter)) > 5
)
_BLENDED_SHARE: Final = 0.4
"""Fraction of word lists with invented words, which teach the spelling of all tokens."""


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
    """Sorting of arbitrary words and numbers, with other wordings and with lists in brackets."""
    if rng.random() < 0.1:
        return sorting(rng)
    separator = rng.choice((" ", " ", " ", ", ", ", ", ", ", ", ", ", ", "\n", ","))
    count = rng.choice((2, 3, 3, 4, 4, 5))
    if rng.random() < 0.72:
        maker = _blended_words if rng.random() < _BLENDED_SHARE else _any_words
        kind, words = maker(rng, count)
        items = _distinct(words)
        ordered = sorted(items, key=str.lower)
        form = rng.choice(SORT_WORDS + _SORT_ANY)
    else:
        kind, numbers = "numbers", _distinct_numbers(rng, count)
        is_descending = rng.random() < 0.15
        items = [str(number) for number in numbers]
        ordered = [str(number) for number in sorted(numbers, reverse=is_descending)]
        form = rng.choice(_SORT_DOWN if is_descending else _SORT_UP + _SORT_ANY_NUMBERS)
    key = f"sort:{' '.join(items)}"
    asked, answer = separator.join(items), separator.join(ordered)
    if separator == ", " and rng.random() < 0.1:
        asked, answer = f"[{asked}]", f"[{answer}]"
    turn = Turn(form.format(x=asked, kind=kind), answer)
    return Sample(family="sorting", turns=(turn,), keys=(key,))


def separator_of(rng: Random) -> str:
    """A separator for list items."""
    return rng.choice((" ", ", "))


def _words(rng: Random, count: int) -> list[str]:
    kind = rng.random()
    if kind < 0.1:
        return [invented_word(rng) for _ in range(count)]
    return rng.choices(NAMES if kind < 0.25 else NOUNS, k=count)


def _any_words(rng: Random, count: int) -> tuple[str, list[str]]:
    """Name of a kind, and words of this kind, of all kinds, or with the same first letter."""
    choice = rng.random()
    kind = "words"
    if choice < 0.6:
        kind, pool = rng.choices(_EVERYDAY, weights=_KIND_WEIGHTS)[0]
        words = rng.sample(pool, k=count)
    elif choice < 0.85:
        words = rng.sample(_ALL_WORDS, k=count)
    else:
        words = rng.sample(rng.choice(_BY_LETTER), k=count)
    if rng.random() < 0.1:
        words = [word.capitalize() for word in words]
    return kind, words


def _blended_words(rng: Random, count: int) -> tuple[str, list[str]]:
    """Invented words, each with the beginning of one word and the end of another.

    All first letters are equally frequent; in 1/4 of the lists, words have the same beginning.
    """
    letters = rng.choice((1, 1, 2, 2, 3, 4))
    if rng.random() < 0.25:
        heads = [rng.choice(_SPELLINGS)] * count
    else:
        heads = [rng.choice(rng.choice(_BY_LETTER)) for _ in range(count)]
    words = [head[:letters] + rng.choice(_SPELLINGS)[-rng.randrange(2, 6) :] for head in heads]
    if rng.random() < 0.2:
        words[0] = rng.choice(_SPELLINGS)
    if rng.random() < 0.25:
        words = [word.capitalize() for word in words]
    return "words", words


def _distinct_numbers(rng: Random, count: int) -> list[int]:
    """Distinct numbers of up to three digits, often with different lengths."""
    if rng.random() < 0.5:
        return rng.sample(range(rng.choice((10, 100, 100, 1000))), k=count)
    numbers = (rng.randrange(10 ** rng.choice((1, 2, 2, 3))) for _ in range(count))
    return list(dict.fromkeys(numbers))


def _distinct(words: list[str]) -> list[str]:
    """The words without duplicates, ignoring case."""
    return list({word.lower(): word for word in words}.values())
