"""Exchanges whose last question makes sense only after the earlier ones."""

from __future__ import annotations

import json
from random import Random
from typing import Final

from deploy.models.sample import Sample, Turn
from deploy.models.tasks.arithmetic import add_key, arithmetic, operand, subtract_key
from deploy.models.tasks.lists import REVERSE_WORDS, SORT_WORDS, separator_of
from deploy.models.tasks.records import ask_person, person
from deploy.models.tasks.townfacts import any_relation, ask
from deploy.models.words import ANIMALS, COLORS, FRUITS, JOBS, NOUNS, TOWNS, person_name

_FIRST_SUM: Final = ("What is {a} + {b}?", "{a} + {b} =", "Add {a} and {b}.")
_PLUS: Final = ("And plus {c}?", "Now add {c}.", "Plus {c}?", "and + {c}?")
_MINUS: Final = ("And minus {c}?", "Now subtract {c}.", "Minus {c}?", "and - {c}?")
_NOW_REVERSE: Final = ("Now reverse that.", "Now reverse it.", "And backwards?")
_NOW_SORT: Final = ("Now sort that.", "Now sort it.", "And sorted?")
_REMEMBERED: Final = (
    (
        ("My name is {x}.", "I am {x}.", "Hello, my name is {x}."),
        "Nice to meet you, {x}.",
        ("What is my name?", "Who am I?", "Do you remember my name?"),
        "Your name is {x}.",
    ),
    (
        ("My favorite color is {x}.", "I like the color {x} best."),
        "{x} is a good color.",
        ("What is my favorite color?", "Which color do I like best?"),
        "Your favorite color is {x}.",
    ),
    (
        ("I live in {x}.", "My home is in {x}."),
        "I hear that {x} is nice.",
        ("Where do I live?", "Which town do I live in?"),
        "You live in {x}.",
    ),
    (
        ("I work as a {x}.", "I am a {x}."),
        "Being a {x} sounds interesting.",
        ("What is my job?", "What do I work as?"),
        "You work as a {x}.",
    ),
    (
        ("Remember the number {x}.", "Please remember {x}."),
        "I will remember {x}.",
        ("Which number did I tell you?", "What was the number?"),
        "The number is {x}.",
    ),
    (
        ("I have a {x}.", "At home I have a {x}."),
        "A {x} is good company.",
        ("Which animal do I have?", "What animal do I have at home?"),
        "You have a {x}.",
    ),
    (
        ("I like to eat {x}.", "My favorite fruit is {x}."),
        "I have heard that {x} is tasty.",
        ("What do I like to eat?", "What is my favorite fruit?"),
        "You like {x}.",
    ),
)


def followup(rng: Random) -> Sample:
    """An exchange of up to four turns; if it is held out, only the last answer is evaluated."""
    kinds = (_sum_goes_on, _sum_goes_on, _list_goes_on, _remembering, _remembering)
    return rng.choice((*kinds, _record_changed, _next_fact, _say_again))(rng)


def _sum_goes_on(rng: Random) -> Sample:
    a, b = operand(rng), operand(rng)
    total = a + b
    turns = [Turn(rng.choice(_FIRST_SUM).format(a=a, b=b), str(total))]
    keys = [add_key(a, b)]
    for _ in range(rng.choice((1, 1, 2))):
        c = rng.randrange(1, 11)
        if rng.random() < 0.6:
            turns.append(Turn(rng.choice(_PLUS).format(c=c), str(total + c)))
            keys.append(add_key(total, c))
            total += c
        elif c <= total:
            turns.append(Turn(rng.choice(_MINUS).format(c=c), str(total - c)))
            keys.append(subtract_key(total, c))
            total -= c
    return _sample(turns, *keys)


def _list_goes_on(rng: Random) -> Sample:
    items, separator = rng.sample(NOUNS, k=rng.randrange(2, 6)), separator_of(rng)
    listed = separator.join(items)
    backwards = separator.join(reversed(items))
    in_order = separator.join(sorted(items))
    if rng.random() < 0.5:
        turns = [
            Turn(rng.choice(REVERSE_WORDS).format(x=listed), backwards),
            Turn(rng.choice(_NOW_SORT), in_order),
        ]
    else:
        turns = [
            Turn(rng.choice(SORT_WORDS).format(x=listed), in_order),
            Turn(rng.choice(_NOW_REVERSE), separator.join(sorted(items, reverse=True))),
        ]
    return _sample(turns, f"sort:{' '.join(items)}", f"reverse:{listed}")


def _remembering(rng: Random) -> Sample:
    kind = rng.randrange(len(_REMEMBERED))
    told, reply, asked, answer = _REMEMBERED[kind]
    number = str(rng.randrange(10, 10000))
    pools = (COLORS, TOWNS, JOBS, (number,), ANIMALS, FRUITS)
    value = person_name(rng) if kind == 0 else rng.choice(pools[kind - 1])
    replied = reply.format(x=value)
    turns = [Turn(rng.choice(told).format(x=value), replied[0].upper() + replied[1:])]
    keys: list[str] = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        between = arithmetic(rng)
        turns += between.turns
        keys += between.keys
    turns.append(Turn(rng.choice(asked), answer.format(x=value)))
    return _sample(turns, f"remember:{'|'.join(turn.user for turn in turns)}", *keys)


def _record_changed(rng: Random) -> Sample:
    record = person(rng)
    changed = {**record, **{"age": rng.randrange(5, 100)}}
    form = rng.choice(("Now change the age to {x}.", "Set the age to {x}.", "The age is {x} now."))
    second = Turn(form.format(x=changed["age"]), json.dumps(changed))
    return _sample([ask_person(rng, record), second], f"json:{second.assistant}")


def _next_fact(rng: Random) -> Sample:
    relation = any_relation(rng)
    (first, first_value), (second, second_value) = rng.sample(relation.facts, k=2)
    turn, key = ask(rng, relation, first, first_value)
    form = rng.choice(("And the {s}?", "And what about the {s}?", "and the {s}?"))
    then = Turn(form.format(s=second), relation.tell(second, second_value))
    return _sample([turn, then], key, f"next:{relation.name}:{first}:{second}")


def _say_again(rng: Random) -> Sample:
    relation = any_relation(rng)
    turn, key = ask(rng, relation, *rng.choice(relation.facts))
    form = rng.choice(("Say that again.", "Repeat that.", "Please repeat your answer."))
    again = f"again:{turn.user}:{form}"
    return _sample([turn, Turn(form, turn.assistant)], key, again)


def _sample(turns: list[Turn], *keys: str) -> Sample:
    return Sample(family="followup", turns=tuple(turns), keys=keys)
