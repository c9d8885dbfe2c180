"""Tools and questions of the tool loops, and the outcome of a run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_TURNS = 6
"""Maximum requests per run; a loop that needs more has failed."""
_TOWNS = ("Oslo", "Rome", "Lyon", "Berlin", "Kyoto", "Lisbon", "Prague", "Vienna")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def get_weather(city: str) -> str:
    """The weather in a city."""
    if city == "Rome":
        raise LookupError("no such town")
    return "sunny" if len(city) % 2 else "rainy"


def get_date() -> str:
    """Today's day of the week."""
    return "Monday"


FUNCTIONS: Mapping[str, Callable[..., Any]] = {f.__name__: f for f in (add, get_weather, get_date)}
_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "add": {"a": "integer", "b": "integer"},
    "get_weather": {"city": "string"},
    "get_date": {},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question, and the tool calls required to answer it."""

    question: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


@dataclass(kw_only=True, slots=True)
class Run:
    """Outcome of one run."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    answer: str | None = None
    """Final text; None if the loop did not end with an answer."""
    faults: list[str] = field(default_factory=list)
    """Protocol violations."""

    def call(self, name: str, arguments: object) -> tuple[str, bool]:
        """Runs a tool call; returns the result as text and whether it failed."""
        if not isinstance(arguments, dict):
            self.faults.append(f"arguments of {name} are not a JSON object: {arguments!r}")
            return "bad arguments", True
        self.calls.append((name, arguments))
        return made(name, arguments)


def made(name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """Result of a call as text, and whether it failed; the name and arguments may be anything."""
    try:
        return str(FUNCTIONS[name](**arguments)), False
    except (LookupError, TypeError) as error:
        return f"{error}", True


def schema(name: str) -> dict[str, Any]:
    """JSON schema of a function's arguments."""
    properties = {key: {"type": kind} for key, kind in _PARAMETERS[name].items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


def description(name: str) -> str:
    """Tool definition of a function."""
    return FUNCTIONS[name].__doc__ or ""


def parsed(run: Run, text: str) -> object:
    """Parsed arguments of a call; None, with a recorded fault, if they are not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        run.faults.append(f"arguments are not JSON: {text!r}")
        return None


def random_question(rng: random.Random) -> Question:
    """A question that requires one call, two parallel calls, or none."""
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
