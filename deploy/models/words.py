"""Fixed vocabulary of the synthetic data, and generators of invented words."""

from __future__ import annotations

from random import Random
from typing import Final


def words_of(text: str) -> tuple[str, ...]:
    """Words of a text, in order."""
    return tuple(text.split())


NOUNS: Final = words_of(
    """
    acorn anchor apple apron arrow badge banjo barrel basket beacon bell berry blanket boat book
    bottle branch bread brick bridge broom brush bucket butter button cabin cable cactus camel
    candle canoe carrot castle chain chair cherry circle clock cloud clover coat comet copper coral
    cotton crayon crown daisy desk dolphin donkey dragon drum eagle echo ember engine falcon
    feather fence fern ferry fiddle field flag flame flute forest fossil fountain fox garden garlic
    ginger glass glove goose grape guitar hammer harbor harp hazel hedge heron honey horse island
    ivory jacket jewel kettle kite ladder lamp lantern lemon lily lion lizard locket magnet mango
    maple marble meadow melon mirror mitten moon moss mountain needle nest nickel oak oar ocean
    olive onion orange orchid otter oven owl paddle pepper piano pigeon pillow planet plum pocket
    pony potato puzzle quilt rabbit radish ribbon river robin rocket rose saddle salmon sandal
    shell silver spoon squirrel star table teapot thunder ticket tiger tomato tulip tunnel turtle
    umbrella valley velvet violin wagon walnut water whale willow window winter wolf yarn zebra
    """
)

FRUITS: Final = ("apple", "banana", "pear", "plum", "cherry", "grape", "lemon", "mango", "melon")

COLORS: Final = (
    *("red", "blue", "green", "yellow", "black", "white", "brown", "purple", "pink", "gray"),
    *("orange", "silver"),
)

ADJECTIVES: Final = (
    *("small", "big", "old", "young", "quiet", "loud", "bright", "dark", "warm", "cold", "brave"),
    *("clever", "happy", "lazy", "quick", "slow", "gentle", "heavy", "tiny", "tall"),
)

ANIMALS: Final = (
    *("cat", "dog", "fox", "horse", "rabbit", "bear", "wolf", "duck", "mouse", "goat"),
    *("sheep", "hen", "frog", "turtle", "pony"),
)

VERBS: Final = (
    *("sees", "finds", "carries", "follows", "paints", "washes", "likes", "watches", "buys"),
    *("sells", "hides", "brings", "needs", "holds", "draws", "moves"),
)

PLACES: Final = (
    *("in the garden", "near the river", "by the window", "under the bridge", "on the hill"),
    *("at the market", "behind the house", "in the forest", "at the station", "on the table"),
    *("in the morning", "after dinner", "on Sunday", "in winter", "before noon", "every day"),
)

NAMES: Final = words_of(
    """
    Ada Alice Anna Arthur Ben Bruno Carla Carl Clara Daniel David Dora Edgar Ella Emil Emma Erik
    Eva Felix Fiona Frank Frida Georg Greta Hanna Hugo Ida Igor Ines Ivan Jack James Jane John Jon
    Julia Karl Kate Klara Laura Lea Leo Lily Lina Lucas Luis Maria Mark Marta Max Mia Mila Mira
    Nina Noah Nora Olga Omar Oscar Otto Paul Petra Peter Rita Robert Rosa Ruth Sam Sara Sofia Sven
    Theo Tim Tina Tom Uma Vera Victor Wanda Yara Zoe
    """
)

TOWNS: Final = words_of(
    """
    Amsterdam Athens Barcelona Bergen Berlin Boston Cairo Chicago Dublin Geneva Hamburg Helsinki
    Kyoto Larkmoor Lima Lisbon London Lyon Madrid Milan Munich Nairobi Naples Oslo Oxford Paris
    Porto Prague Riga Rome Seattle Sydney Tokyo Toronto Turin Vienna Warsaw York Zurich
    """
)

JOBS: Final = (
    *("baker", "teacher", "doctor", "nurse", "pilot", "farmer", "painter", "carpenter", "cook"),
    *("gardener", "lawyer", "driver", "tailor", "singer", "writer", "plumber"),
    *("librarian", "fisher", "mechanic"),
)

_ONSETS: Final = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "tr")
_VOWELS: Final = ("a", "e", "i", "o", "u")
_CODAS: Final = ("", "", "", "n", "r", "l", "s", "x", "k", "m")


def invented_word(rng: Random) -> str:
    """A pronounceable invented word of two or three syllables."""
    syllables = rng.choice((2, 2, 3))
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if last else "")
        for last in (index == syllables - 1 for index in range(syllables))
    )


def person_name(rng: Random) -> str:
    """Usually a known first name, sometimes an invented one, so that the model learns to copy
    names."""
    return rng.choice(NAMES) if rng.random() < 0.7 else invented_word(rng).capitalize()


def noun_phrase(rng: Random) -> str:
    """An article, an adjective or color, and a noun."""
    describing = rng.choice(ADJECTIVES if rng.random() < 0.5 else COLORS)
    return f"the {describing} {rng.choice(ANIMALS if rng.random() < 0.5 else NOUNS)}"


def sentence(rng: Random) -> str:
    """A short plain sentence that starts with a capital letter and ends with a period."""
    subject = person_name(rng) if rng.random() < 0.5 else noun_phrase(rng)
    body = f"{subject} {rng.choice(VERBS)} {noun_phrase(rng)} {rng.choice(PLACES)}."
    return body[0].upper() + body[1:]
