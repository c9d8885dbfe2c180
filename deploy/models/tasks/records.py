"""JSON records to fill from a sentence."""

from __future__ import annotations

import json
from random import Random
from typing import Final, TypeAlias

from deploy.models.sample import Sample, Turn
from deploy.models.words import COLORS, JOBS, NOUNS, TOWNS, person_name

Record: TypeAlias = dict[str, str | int]

_ASK: Final = (
    *("Fill a JSON record: {x}", "Write this as JSON: {x}", "Make a JSON record. {x}"),
    *("Turn this into JSON: {x}", "{x} Give me the JSON.", "JSON: {x}"),
    "Extract the fields as JSON: {x}",
)
_PERSON: Final[tuple[str, ...]] = (
    "{name} is {age} years old, lives in {town} and works as a {job}.",
    "{name} works as a {job} in {town} and is {age} years old.",
    "{name}, aged {age}, is a {job} from {town}.",
    "In {town} lives a {job} called {name}, who is {age}.",
    "The {job} {name} is {age} and lives in {town}.",
)
_ORDER: Final[tuple[str, ...]] = (
    "{customer} orders {quantity} {color} {item} boxes for {price} dollars.",
    "{quantity} {color} {item} boxes for {customer}, {price} dollars.",
    "For {price} dollars {customer} gets {quantity} {color} {item} boxes.",
)
_MEETING: Final[tuple[str, ...]] = (
    "{name} meets {guest} on {day} at {hour} in {town}.",
    "On {day} at {hour}, {name} and {guest} meet in {town}.",
    "Meeting of {name} with {guest} in {town}, {day} at {hour}.",
)
_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def records(rng: Random) -> Sample:
    """A sentence, and the JSON object to extract from it, with a fixed order of keys."""
    kind = rng.random()
    if kind < 0.5:
        record, forms = person(rng), _PERSON
    elif kind < 0.75:
        record, forms = _order(rng), _ORDER
    else:
        record, forms = _meeting(rng), _MEETING
    told = rng.choice(forms).format(**record)
    answer = json.dumps(record)
    turn = Turn(rng.choice(_ASK).format(x=told), answer)
    return Sample(family="json", turns=(turn,), keys=(f"json:{answer}",))


def person(rng: Random) -> Record:
    """Record of one person."""
    return {
        "name": person_name(rng),
        "age": rng.randrange(5, 100),
        "town": rng.choice(TOWNS),
        "job": rng.choice(JOBS),
    }


def ask_person(rng: Random, record: Record) -> Turn:
    """Exchange that turns a sentence about a person into the record."""
    told = rng.choice(_PERSON).format(**record)
    return Turn(rng.choice(_ASK).format(x=told), json.dumps(record))


def _order(rng: Random) -> Record:
    return {
        "customer": person_name(rng),
        "item": rng.choice(NOUNS),
        "color": rng.choice(COLORS),
        "quantity": rng.randrange(2, 100),
        "price": rng.randrange(1, 500),
    }


def _meeting(rng: Random) -> Record:
    return {
        "name": person_name(rng),
        "guest": person_name(rng),
        "day": rng.choice(_DAYS),
        "hour": f"{rng.randrange(7, 20)}:{rng.choice(('00', '15', '30', '45'))}",
        "town": rng.choice(TOWNS),
    }
