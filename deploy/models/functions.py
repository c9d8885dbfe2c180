"""Small functions that a client can declare: a calculator, facts about towns, a calendar and more.

Names, descriptions and parameters vary between declarations, so that a model must read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias

from deploy.models.words import ADJECTIVES, NOUNS, TOWNS, invented_word, person_name

Value: TypeAlias = int | float | str
Values: TypeAlias = tuple[Value | None, ...]
"""Values of the parameters, in order; None for omitted optional parameters."""

_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_EVENTS: Final = (
    *("lunch", "dinner", "meeting", "dentist", "swimming", "choir", "football", "piano lesson"),
    *("board meeting", "birthday party", "market visit", "boat trip"),
)
_WEATHER: Final = ("sunny", "rainy", "cloudy", "windy", "foggy", "snow", "clear", "stormy")


class Parameter(NamedTuple):
    """One parameter of a declared function."""

    key: str
    is_number: bool
    is_required: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A function as declared by a client."""

    kind: Kind
    name: str
    description: str
    parameters: tuple[Parameter, ...]

    @property
    def signature(self) -> str:
        """Name and keys. A declaration with this signature is held out if the signature is (see
        `is_heldout_key`)."""
        return f"{self.name}({', '.join(parameter.key for parameter in self.parameters)})"

    def declared(self) -> dict[str, Any]:
        """The declaration in OpenAI's format."""
        properties = {
            parameter.key: {"type": "integer" if parameter.is_number else "string"}
            for parameter in self.parameters
        }
        schema = {
            "type": "object",
            "properties": properties,
            "required": [p.key for p in self.parameters if p.is_required],
        }
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}

    def arguments(self, values: Values) -> dict[str, Value]:
        """Arguments of a call."""
        return {
            parameter.key: value
            for parameter, value in zip(self.parameters, values, strict=True)
            if value is not None
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of function, with varying names and wordings."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    keys: tuple[tuple[str, ...], ...]
    """Alternative lists of parameter names; a declaration uses one of them."""
    numbers: tuple[bool, ...]
    """Whether each parameter is a number."""
    num_required: int
    questions: tuple[str, ...]
    """Questions; ``{0}``, ``{1}`` … are replaced by the values."""
    values: Callable[[Random], Values]
    result: Callable[[Random, Values], Any]
    """Generates a possible return value of a call, as JSON."""
    operation: str = ""
    """Calculation that the function performs, named as in the keys of arithmetic samples; `any` if
    it performs all of them, empty if none."""
    is_about_towns: bool = False
    with_optional: str = ""
    """Text to insert before the final punctuation of a question if the last value is given."""

    def ask(self, rng: Random, values: Values) -> str:
        """A question that needs the function."""
        question = rng.choice(self.questions).format(*values)
        if self.with_optional and values[-1] is not None:
            end = question[-1] if question[-1] in "?." else ""
            question = question.removesuffix(end) + self.with_optional.format(*values) + end
        return question

    def declare(self, rng: Random) -> Function:
        """A function of this kind, with a newly sampled name and keys."""
        name = rng.choice(self.names)
        keys = list(rng.choice(self.keys))
        if rng.random() < 0.15:
            name = f"{name}_{invented_word(rng)}"
        if keys and rng.random() < 0.15:
            keys[rng.randrange(len(keys))] = invented_word(rng)
        return Function(
            kind=self,
            name=name,
            description=rng.choice(self.descriptions),
            parameters=tuple(
                Parameter(key, is_number, index < self.num_required)
                for index, (key, is_number) in enumerate(zip(keys, self.numbers, strict=True))
            ),
        )


def _number(rng: Random) -> int:
    return rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3, 4, 5)))


def _two_numbers(rng: Random) -> Values:
    return _number(rng), _number(rng)


def _calculator(
    operation: str,
    names: tuple[str, ...],
    descriptions: tuple[str, ...],
    questions: tuple[str, ...],
    compute: Callable[[Any, Any], Value],
) -> Kind:
    return Kind(
        names=names,
        descriptions=descriptions,
        keys=(("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("m", "n")),
        numbers=(True, True),
        num_required=2,
        questions=questions,
        values=_two_numbers,
        result=lambda rng, values: compute(*values),
        operation=operation,
    )


def _expression(rng: Random) -> Values:
    terms = [str(_number(rng)) for _ in range(rng.choice((2, 2, 3)))]
    text = terms[0]
    for term in terms[1:]:
        text += f" {rng.choice('+-*/')} {term}"
    return (text,)


def _of_town(
    names: tuple[str, ...],
    descriptions: tuple[str, ...],
    questions: tuple[str, ...],
    result: Callable[[Random], Any],
) -> Kind:
    return Kind(
        names=names,
        descriptions=descriptions,
        keys=(("town",), ("city",), ("place",), ("location",), ("name",)),
        numbers=(False,),
        num_required=1,
        questions=questions,
        values=lambda rng: (_town(rng),),
        result=lambda rng, values: result(rng),
        is_about_towns=True,
    )


def _town(rng: Random) -> str:
    return rng.choice(TOWNS) if rng.random() < 0.7 else invented_word(rng).capitalize()


def _day(rng: Random) -> str:
    return rng.choice(_DAYS)


def _hour(rng: Random) -> str:
    return f"{rng.randrange(7, 21)}:{rng.choice(('00', '15', '30', '45'))}"


def _noun(rng: Random) -> str:
    return rng.choice(NOUNS) if rng.random() < 0.6 else invented_word(rng)


def _degrees(rng: Random) -> dict[str, Value]:
    return {"weather": rng.choice(_WEATHER), "degrees": rng.randrange(-9, 36)}


KINDS: Final[tuple[Kind, ...]] = (
    _calculator(
        "add",
        ("add", "add_numbers", "sum", "plus", "calculator_add", "addition"),
        ("Add two numbers.", "The sum of two numbers.", "Adds a and b.", "Sum of two integers"),
        (
            *("What is {0} + {1}?", "Add {0} and {1}.", "How much is {0} plus {1}?", "{0} + {1}"),
            *(
                "What is {0} plus {1}?",
                "Please add {0} and {1}.",
                "What is the sum of {0} and {1}?",
            ),
        ),
        lambda a, b: a + b,
    ),
    _calculator(
        "subtract",
        ("subtract", "minus", "difference", "subtract_numbers", "sub"),
        ("Subtract two numbers.", "The difference of two numbers.", "Subtracts b from a."),
        (
            *("What is {0} - {1}?", "{0} - {1}", "How much is {0} minus {1}?"),
            *("What is {0} minus {1}?", "Please compute {0} minus {1}."),
        ),
        lambda a, b: a - b,
    ),
    _calculator(
        "multiply",
        ("multiply", "times", "product", "multiply_numbers", "mul"),
        ("Multiply two numbers.", "The product of two numbers.", "Multiplies a and b."),
        (
            *("What is {0} * {1}?", "Multiply {0} by {1}.", "How much is {0} times {1}?"),
            *("{0} * {1}", "What is {0} times {1}?", "What is the product of {0} and {1}?"),
        ),
        lambda a, b: a * b,
    ),
    _calculator(
        "divide",
        ("divide", "division", "quotient", "divide_numbers", "div"),
        ("Divide two numbers.", "The quotient of two numbers.", "Divides a by b."),
        ("What is {0} / {1}?", "Divide {0} by {1}.", "How much is {0} divided by {1}?"),
        lambda a, b: round(a / (b or 1), 2),
    ),
    Kind(
        names=("calculate", "calculator", "evaluate", "compute", "math"),
        descriptions=("Evaluate an expression.", "A calculator.", "Computes a formula."),
        keys=(("expression",), ("formula",), ("input",), ("query",)),
        numbers=(False,),
        num_required=1,
        questions=("What is {0}?", "Calculate {0}.", "Compute {0}", "{0}", "How much is {0}?"),
        values=_expression,
        result=lambda rng, values: rng.randrange(100_000),
        operation="any",
    ),
    Kind(
        names=("get_weather", "weather", "get_current_weather", "weather_in", "getWeather"),
        descriptions=(
            *("The weather in a town.", "Get the weather of a city.", "Current weather"),
            "Get the current weather in a given location.",
        ),
        keys=(("city",), ("town",), ("location",), ("place",)),
        numbers=(False,),
        num_required=1,
        questions=(
            *("What is the weather in {0}?", "How is the weather in {0}?", "Weather in {0}?"),
            *("Is it raining in {0}?", "what's the weather like in {0}", "Is it cold in {0}?"),
        ),
        values=lambda rng: (_town(rng),),
        result=lambda rng, values: rng.choice((rng.choice(_WEATHER), _degrees(rng))),
        is_about_towns=True,
    ),
    Kind(
        names=("get_forecast", "forecast", "weather_on", "weather_forecast"),
        descriptions=("The weather on a day.", "Forecast for a town.", "Weather of the week"),
        keys=(("city", "day"), ("town", "day"), ("location", "date"), ("place", "when")),
        numbers=(False, False),
        num_required=1,
        questions=(
            *("What will the weather be in {0}?", "Give me the forecast for {0}."),
            *("Will it rain in {0}?", "What is the forecast for {0}?"),
        ),
        values=lambda rng: (_town(rng), _day(rng) if rng.random() < 0.6 else None),
        result=lambda rng, values: rng.choice((rng.choice(_WEATHER), _degrees(rng))),
        is_about_towns=True,
        with_optional=" on {1}",
    ),
    _of_town(
        ("get_time", "time_in", "current_time", "local_time", "clock"),
        ("The time in a town.", "Get the local time of a city.", "What time it is somewhere"),
        ("What time is it in {0}?", "Tell me the time in {0}.", "How late is it in {0}?"),
        _hour,
    ),
    _of_town(
        ("get_population", "population", "population_of", "count_people"),
        ("How many people live in a town.", "Population of a city.", "Number of inhabitants"),
        ("How many people live in {0}?", "What is the population of {0}?", "Population of {0}?"),
        lambda rng: rng.randrange(100, 9_000_000),
    ),
    _of_town(
        ("get_mayor", "mayor", "mayor_of", "find_mayor"),
        ("The mayor of a town.", "Who is mayor of a city.", "Name of the mayor"),
        ("Who is the mayor of {0}?", "Name the mayor of {0}.", "Tell me the mayor of {0}."),
        lambda rng: f"{person_name(rng)} {invented_word(rng).capitalize()}",
    ),
    _of_town(
        ("lookup_town", "town_info", "find_town", "get_town", "search_town"),
        ("Facts about a town.", "Look up a town.", "Information about a place"),
        ("Tell me about {0}.", "Look up {0}.", "What do you know about {0}?", "Find {0}."),
        lambda rng: {"river": invented_word(rng).capitalize(), "people": rng.randrange(90_000)},
    ),
    Kind(
        names=("get_distance", "distance", "how_far", "distance_between"),
        descriptions=("Distance between two towns.", "How far two places are apart."),
        keys=(("start", "end"), ("origin", "destination"), ("source", "target"), ("a", "b")),
        numbers=(False, False),
        num_required=2,
        questions=(
            *("How far is it from {0} to {1}?", "What is the distance from {0} to {1}?"),
            "How far is {0} from {1}?",
        ),
        values=lambda rng: (_town(rng), _town(rng)),
        result=lambda rng, values: f"{rng.randrange(5, 3000)} km",
        is_about_towns=True,
    ),
    Kind(
        names=("add_event", "create_event", "schedule", "book", "add_to_calendar"),
        descriptions=("Put an event into the calendar.", "Add an event.", "Schedule something"),
        keys=(
            *(("title", "day", "hour"), ("event", "day", "time"), ("name", "date", "hour")),
            ("what", "day", "time"),
        ),
        numbers=(False, False, False),
        num_required=2,
        questions=(
            *("Put {0} into my calendar on {1}.", "Add {0} on {1}.", "Schedule {0} on {1}."),
            "Please plan {0} on {1}.",
        ),
        values=lambda rng: (
            rng.choice(_EVENTS),
            _day(rng),
            _hour(rng) if rng.random() < 0.6 else None,
        ),
        result=lambda rng, values: rng.choice(("done", "ok", {"status": "booked"})),
        with_optional=" at {2}",
    ),
    Kind(
        names=("list_events", "get_events", "events_on", "show_calendar", "calendar"),
        descriptions=("The events of a day.", "What is in the calendar.", "List a day's events"),
        keys=(("day",), ("date",), ("when",)),
        numbers=(False,),
        num_required=1,
        questions=(
            *("What is in my calendar on {0}?", "What do I have on {0}?", "Am I free on {0}?"),
            "Show my events on {0}.",
        ),
        values=lambda rng: (_day(rng),),
        result=lambda rng, values: rng.sample(_EVENTS, k=rng.randrange(1, 4)),
    ),
    Kind(
        names=("get_date", "today", "current_date", "what_day"),
        descriptions=("The day of today.", "Today's date.", "Which day it is"),
        keys=((),),
        numbers=(),
        num_required=0,
        questions=("What day is it today?", "What is the date?", "Which day is today?"),
        values=lambda rng: (),
        result=lambda rng, values: rng.choice((_day(rng), f"{_day(rng)}, May {_number(rng) % 31}")),
    ),
    Kind(
        names=("roll_dice", "roll", "dice", "throw_die"),
        descriptions=("Roll a die.", "Throws a die with some sides.", "A random number"),
        keys=(("sides",), ("n",), ("faces",)),
        numbers=(True,),
        num_required=1,
        questions=("Roll a die with {0} sides.", "Throw a die of {0} sides.", "Roll a die of {0}."),
        values=lambda rng: (rng.choice((6, 8, 10, 12, 20, 100, rng.randrange(2, 1000))),),
        result=lambda rng, values: rng.randrange(1, 1 + int(values[0] or 6)),
    ),
    Kind(
        names=("send_message", "send", "write_to", "message"),
        descriptions=("Send a message to someone.", "Writes a person a message."),
        keys=(("to", "text"), ("recipient", "message"), ("name", "body"), ("person", "content")),
        numbers=(False, False),
        num_required=2,
        questions=("Tell {0}: {1}", "Send {0} this: {1}", "Write to {0}: {1}"),
        values=lambda rng: (
            person_name(rng),
            f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} is here",
        ),
        result=lambda rng, values: rng.choice(("sent", "ok", "delivered")),
    ),
)


def invented_kind(rng: Random) -> Kind:
    """A kind of function with an invented name, known only from its declaration."""
    verb = invented_word(rng)
    is_number = rng.random() < 0.3
    draw: Callable[[Random], Value] = _number if is_number else _noun
    return Kind(
        names=(verb, f"{verb}_{rng.choice(('it', 'tool', 'thing'))}", f"do_{verb}"),
        descriptions=(f"Can {verb} something.", f"To {verb}.", f"{verb.capitalize()} a thing."),
        keys=(("item",), ("thing",), ("value",), ("what",), (invented_word(rng),)),
        numbers=(is_number,),
        num_required=1,
        questions=tuple(
            form.replace("VERB", verb)
            for form in ("VERB {0}", "Please VERB {0}.", "Can you VERB {0}?", "Now VERB {0}.")
        ),
        values=lambda rng: (draw(rng),),
        result=lambda rng, values: rng.choice((_noun(rng), _number(rng), "done")),
    )
