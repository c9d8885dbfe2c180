"""What agents of the tests may call, what they are asked, and what a run of theirs came to."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_TURNS = 6
"""Requests of one run: who is still calling then has not found its end."""
_TOWNS = ("Oslo", "Rome", "Lyon", "Berlin", "Kyoto", "Lisbon", "Prague", "Vienna")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def get_weather(city: str) -> str:
    """The weather in a town."""
    if city == "Rome":
        raise LookupError("no such town")
    return "sunny" if len(city) % 2 else "rainy"


def get_date() -> str:
    """The day of today."""
    return "Monday"


FUNCTIONS: Mapping[str, Callable[..., Any]] = {f.__name__: f for f in (add, get_weather, get_date)}
_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "add": {"a": "integer", "b": "integer"},
    "get_weather": {"city": "string"},
    "get_date": {},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question, and the calls that answer it."""

    question: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


@dataclass(kw_only=True, slots=True)
class Run:
    """What one run of an agent came to."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    answer: str | None = None
    """The last text; None where the agent did not come to its end."""
    faults: list[str] = field(default_factory=list)
    """What the protocol does not allow."""

    def call(self, name: str, arguments: object) -> tuple[str, bool]:
        """Makes a call. The result as text, and whether it failed."""
        if not isinstance(arguments, dict):
            self.faults.append(f"arguments of {name} are no object: {arguments!r}")
            return "bad arguments", True
        self.calls.append((name, arguments))
        return made(name, arguments)


def made(name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """The result of a call as text, and whether it failed: models may call anything."""
    try:
        return str(FUNCTIONS[name](**arguments)), False
    except (LookupError, TypeError) as error:
        return f"{error}", True


def schema(name: str) -> dict[str, Any]:
    """Of a function's arguments."""
    properties = {key: {"type": kind} for key, kind in _PARAMETERS[name].items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


def description(name: str) -> str:
    """What a function says of itself."""
    return FUNCTIONS[name].__doc__ or ""


def parsed(run: Run, text: str) -> object:
    """Arguments as a client reads them; None, and a fault, where they are no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        run.faults.append(f"arguments are no JSON: {text!r}")
        return None


def random_question(rng: random.Random) -> Question:
    """A question that takes one call, two at once, or none."""
    kind = rng.randrange(6)
    a, b = rng.randrange(100, 10_000), rng.randrange(100, 10_000)
    one, other = rng.sample(_TOWNS, k=2)
    weather = [("get_weather", {"city": town}) for town in (one, other)]
    if kind < 2:
        return Question(question=f"What is {a} + {b}?", calls=(("add", {"a": a, "b": b}),))
    if kind == 2:
        return Question(question=f"What is the weather in {one}?", calls=(weather[0],))
    if kind == 3:
        question = f"What is the weather in {one}? What is the weather in {other}?"
        return Question(question=question, calls=tuple(weather))
    if kind == 4:
        return Question(question="What day is it today?", calls=(("get_date", {}),))
    return Question(question="Reverse this list: lemon, owl, bread", calls=())
