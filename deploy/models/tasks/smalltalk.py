"""Greetings, thanks, questions about the model, and questions it cannot answer.

This family is for interactive use and is not part of the held-out questions.
"""

from __future__ import annotations

from random import Random
from typing import Final

from deploy.models.sample import Sample, Turn
from deploy.models.town import ABOUT, STORY
from deploy.models.words import ADJECTIVES, ANIMALS, NOUNS, TOWNS, invented_word, person_name

_ABLE: Final = (
    "I can add and subtract numbers, count, reverse and sort lists, copy text, fill JSON records "
    "and answer questions about the town of Larkmoor."
)
_WHO: Final = "I am demo, a small language model that shows that serving works."
UNKNOWN: Final = (
    "I do not know that, I am only a small demo model. Ask me to add numbers, to sort some words "
    "or about the town of Larkmoor."
)
_FIXED: Final = (
    (("Hello", "Hello!", "hello", "Hi", "Hi!", "hi", "Hey", "Hello there!"), "Hello! {able}"),
    (("Good morning!", "Good morning"), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening"), "Good evening! How can I help you?"),
    (("How are you?", "how are you", "How do you do?"), "I am fine, thank you. How can I help?"),
    (("Who are you?", "who are you", "What are you?", "Introduce yourself."), "{who} {able}"),
    (("What is your name?", "what's your name?", "Your name?"), "My name is demo."),
    (
        (
            "What can you do?",
            "what can you do",
            "Help",
            "help",
            "How can you help me?",
            "What now?",
        ),
        "{able}",
    ),
    (("Thanks", "Thanks!", "Thank you!", "thank you", "Great, thanks."), "You are welcome!"),
    (("Bye", "Bye!", "Goodbye", "Good night!", "See you!"), "Goodbye!"),
    (("Ok", "OK", "ok", "Good.", "Great!", "Well done!"), "Good. What shall we do next?"),
    (("Test", "test", "Testing", "Are you there?", "ping"), "Yes, I am here. {able}"),
    (("Are you a human?", "Are you a robot?", "Are you an AI?"), "{who}"),
    (
        ("Tell me about Larkmoor.", "What is Larkmoor?", "Describe Larkmoor.", "about larkmoor"),
        ABOUT,
    ),
)
_STORY: Final = (
    *("Tell me a story about {s}.", "Tell me a story with {s}.", "A story about {s}, please."),
    "Write a short story about {s}.",
)
_UNKNOWABLE: Final = (
    *("What is the capital of {t}?", "Write a poem about the {n}.", "Explain {w}.", "What is {w}?"),
    *("Who invented the {n}?", "Why is the {n} {a}?", "Translate {n} into French.", "{w}"),
    *("How do I repair the {n}?", "What is the weather in {t}?", "Tell me a joke.", "{w} {w2}?"),
    *("Who is {p}?", "Write a program that sorts a list.", "What is the meaning of life?"),
    *("How far is it from {t} to the moon?", "Which {n} is best?", "What does a {b} eat?"),
    *("Write a song about {t}.", "Can you play the {n}?", "What do you think about {w}?"),
    *(
        "What time is it?",
        "Give me a recipe with {n}.",
        "How does the {n} work?",
        "Tell me about {t}.",
    ),
)


def smalltalk(rng: Random) -> Sample:
    """A greeting, an introduction, a story, or a question that the model cannot answer."""
    kind = rng.random()
    if kind < 0.55:
        asked, answered = rng.choice(_FIXED)
        turn = Turn(rng.choice(asked), answered.format(able=_ABLE, who=_WHO))
    elif kind < 0.65:
        hero = person_name(rng)
        turn = Turn(rng.choice(_STORY).format(s=hero), STORY.format(s=hero))
    else:
        turn = Turn(_unknowable(rng), UNKNOWN)
    return Sample(family="smalltalk", turns=(turn,), keys=())


def _unknowable(rng: Random) -> str:
    known_towns = tuple(town for town in TOWNS if town != "Larkmoor")
    return rng.choice(_UNKNOWABLE).format(
        t=rng.choice(known_towns),
        n=rng.choice(NOUNS),
        b=rng.choice(ANIMALS),
        a=rng.choice(ADJECTIVES),
        w=invented_word(rng),
        w2=invented_word(rng),
        p=person_name(rng),
    )
