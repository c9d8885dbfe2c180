"""Text to repeat exactly or with one replacement."""

from __future__ import annotations

from random import Random
from string import ascii_lowercase
from typing import Final

from deploy.models.sample import Sample, Turn
from deploy.models.words import ANIMALS, COLORS, FRUITS, NAMES, NOUNS, invented_word, sentence

_COPY: Final = (
    *("Repeat exactly: {x}", "Copy this text: {x}", "Repeat after me: {x}", "Say: {x}"),
    *("Please copy: {x}", "Write this again: {x}", "Echo: {x}", "repeat {x}"),
)
_REPLACE: Final = (
    "Replace {old} with {new}: {x}",
    "Change {old} to {new} in this text: {x}",
    "Write this again with {new} instead of {old}: {x}",
)
_SCENES: Final = (
    *("The {x} is near the {y}.", "I see the {x} and the {y}.", "The {x} needs the {y}."),
    *("My {x} and your {y} are here. The {x} is old.", "Where is the {x}? The {y} is here."),
)


def copying(rng: Random) -> Sample:
    """A text to repeat word for word, or with one word replaced throughout."""
    if rng.random() < 0.3:
        return _replacing(rng)
    text = _text(rng)
    question = rng.choice(_COPY).format(x=text)
    return Sample(family="copying", turns=(Turn(question, text),), keys=(f"copy:{text}",))


def _text(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return _sentences(rng)
    if kind < 0.55:
        return "".join(rng.choices("0123456789", k=rng.randrange(2, 13)))
    if kind < 0.7:
        return " ".join(rng.choices(ascii_lowercase, k=rng.randrange(2, 9)))
    if kind < 0.85:
        return " ".join(invented_word(rng) for _ in range(rng.randrange(1, 5)))
    return " ".join(rng.choices(NOUNS + NAMES + COLORS, k=rng.randrange(1, 9)))


def _sentences(rng: Random) -> str:
    count = rng.randrange(4, 13) if rng.random() < 0.08 else rng.choice((1, 1, 2, 3))
    return " ".join(sentence(rng) for _ in range(count))


def _replacing(rng: Random) -> Sample:
    pool = rng.choice((FRUITS, ANIMALS, NOUNS))
    old, new = rng.sample(pool, k=2)
    text = rng.choice(_SCENES).format(x=old, y=rng.choice(pool))
    if rng.random() < 0.6:
        text = f"{text} {sentence(rng)}"
    question = rng.choice(_REPLACE).format(old=old, new=new, x=text)
    answer = " ".join(_swap(word, old, new) for word in text.split(" "))
    key = f"replace:{old}:{new}:{text}"
    return Sample(family="copying", turns=(Turn(question, answer),), keys=(key,))


def _swap(word: str, old: str, new: str) -> str:
    return word.replace(old, new) if word.strip(".?") == old else word
