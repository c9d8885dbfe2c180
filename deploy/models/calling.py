"""Conversations with function declarations: calls, results, and questions that need no call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Final, NamedTuple

from deploy.models.corpus import (
    SYSTEM_PROMPTS,
    Conversation,
    Question,
    training_conversations,
    training_sample,
)
from deploy.models.functions import KINDS, Function, Kind, Value, Values, invented_kind
from deploy.models.sample import Sample, Turn, is_heldout_key
from deploy.models.tasks import POLISHING_TASKS, TASKS, Task, Tasks
from deploy.models.tasks.arithmetic import arithmetic
from deploy.models.tasks.followup import followup
from deploy.models.tasks.lists import sorting_any
from deploy.models.tasks.outside import outside
from deploy.models.tasks.smalltalk import UNKNOWN, smalltalk

HELDOUT_SEED: Final = 2028
_QUESTIONS: Final = {"single": 40, "parallel": 15, "none": 20, "result": 25}
"""Number of held-out questions per family."""
_SHARES: Final = {"functions": 0.42, "sums": 0.18, "plain": 0.4}
"""Shares of the kinds of conversations in the second phase. `sums` and `plain` are tasks of the
first phase, included so that the model does not forget them; it forgets sums first. `sums`
is arithmetic, so short that it makes up only 1/20 of the tokens; functions make up 2/3."""
_POLISHING_SHARES: Final = {
    "functions": 0.14,
    "sums": 0.14,
    "plain": 0.12,
    "sorts": 0.55,
    "outside": 0.05,
}
"""Shares of the kinds of conversations in the third phase. Arbitrary words take longest to learn;
the other kinds prevent forgetting. With a share of only 1/20 for functions, 1/8 of the correct
calls were forgotten."""
_THOUGHT_SHARE: Final = 0.12
"""Fraction of plain conversations, and of conversations with functions, that have reasoning."""
_FAILURES: Final = (
    *("no such town", "not found", "timeout", "permission denied", "unknown name", "bad input"),
    *("the server is down", "try again later", "division by zero", "no connection"),
)
_NOTHING: Final = ("null", "None", "[]", "{}", "")
_THOUGHTS: Final = {
    "arithmetic": "This is a calculation.",
    "counting": "I have to count.",
    "reversing": "I go backwards.",
    "sorting": "I put them in order.",
    "copying": "I write the text again.",
    "json": "I fill a record.",
    "town": "I know Larkmoor.",
    "followup": "This goes on from before.",
    "smalltalk": "This is small talk.",
    "outside": "I do not know that.",
}


class Call(NamedTuple):
    """One call of a declared function."""

    name: str
    arguments: dict[str, Value]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A question, the calls it needs, their results, and the answer."""

    question: str
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()
    """Results as the client sends them, one per call."""
    answer: str
    thought: str
    """Reasoning before the calls, or before the answer if there are none."""
    keys: tuple[str, ...] = ()
    """Identities of the exchange; see `Sample.keys`."""

    def turns(self) -> tuple[Turn, ...]:
        """Turns as text, including markers."""
        if not self.calls:
            return (Turn(self.question, self.answer),)
        return (
            Turn(self.question, written_calls(self.calls)),
            Turn(written_results(self.results), self.answer),
        )


def written_tools(functions: tuple[Function, ...]) -> str:
    """System message that declares the functions: one line per function, with its arguments."""
    lines = []
    for function in functions:
        shown = ", ".join(
            f'"{p.key}"{"" if p.is_required else "?"}: {"0" if p.is_number else chr(34) * 2}'
            for p in function.parameters
        )
        lines.append(f"{function.name} {{{shown}}}: {function.description}\n")
    return f"<tools>\n{''.join(lines)}</tools>"


def written_calls(calls: tuple[Call, ...]) -> str:
    """Assistant text that makes the calls."""
    return "\n".join(
        f"<tool_call>\n{json.dumps(call._asdict(), ensure_ascii=False)}\n</tool_call>"
        for call in calls
    )


def written_results(results: tuple[str, ...]) -> str:
    """User turn that contains the results."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def tool_conversations(rng: Random, *, is_polishing: bool = False) -> Iterator[Conversation]:
    """Infinite stream of conversations for the later phases, with and without functions, some with
    reasoning.

    Args:
        rng: random generator.
        is_polishing: whether to generate the third phase's conversations.
    """
    shares, tasks = (_POLISHING_SHARES, POLISHING_TASKS) if is_polishing else (_SHARES, TASKS)
    plain = training_conversations(rng, tasks)
    while True:
        kind = rng.choices(tuple(shares), weights=tuple(shares.values()))[0]
        if kind == "functions":
            yield _with_functions(rng, tasks)
        elif kind == "sums":
            yield Conversation(system=None, turns=_sum(rng).turns)
        elif kind == "sorts":
            yield Conversation(system=None, turns=_not_heldout(rng, sorting_any).turns)
        elif kind == "outside":
            yield Conversation(system=None, turns=outside(rng).turns)
        elif rng.random() < _THOUGHT_SHARE:
            sample = training_sample(rng, tasks)
            yield Conversation(system=None, turns=sample.turns, thought=_THOUGHTS[sample.family])
        else:
            yield next(plain)


def tool_questions() -> list[Question]:
    """Held-out questions with functions; the same list on every call."""
    rng = Random(HELDOUT_SEED)
    return [
        question
        for family, count in _QUESTIONS.items()
        for question in _heldout_questions(rng, family, count)
    ]


def _sum(rng: Random) -> Sample:
    """A calculation or, in 3 of 10 cases, an exchange with follow-up questions."""
    return _not_heldout(rng, arithmetic if rng.random() < 0.7 else followup)


def _not_heldout(rng: Random, task: Task) -> Sample:
    while True:
        sample = task(rng)
        if not sample.is_heldout():
            return sample


def _with_functions(rng: Random, tasks: Tasks) -> Conversation:
    functions = _declare(rng, is_heldout=False)
    parts = [_training_exchange(rng, functions, tasks) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    turns = tuple(turn for part in parts for turn in part.turns())
    thought = parts[-1].thought
    if parts[-1].calls and rng.random() < 0.6:
        turns = turns[:-1]  # ends with the calls: answers to results are learned quickly
    elif parts[-1].calls:
        thought = "I have the result."
    system = written_tools(functions)
    if rng.random() < 0.25:
        system = f"{rng.choice(SYSTEM_PROMPTS)}\n\n{system}"
    is_thinking = rng.random() < _THOUGHT_SHARE
    return Conversation(system=system, turns=turns, thought=thought if is_thinking else None)


def _declare(rng: Random, *, is_heldout: bool) -> tuple[Function, ...]:
    """One to five functions: with `is_heldout`, at least one has a held-out signature; otherwise,
    none has."""
    while True:
        kinds = rng.sample(KINDS, k=rng.choice((1, 2, 3, 3, 4, 5)))
        if rng.random() < 0.25:
            kinds[rng.randrange(len(kinds))] = invented_kind(rng)
        operations = [kind.operation for kind in kinds if kind.operation]
        if "any" in operations and len(operations) > 1:
            continue  # either function would do
        functions = tuple(kind.declare(rng) for kind in kinds)
        names = {function.name for function in functions}
        if len(names) < len(functions):
            continue
        if any(is_heldout_key(f"signature:{f.signature}") for f in functions) == is_heldout:
            return functions


def _training_exchange(rng: Random, functions: tuple[Function, ...], tasks: Tasks) -> Exchange:
    while True:
        family = rng.choices(("single", "parallel", "none"), weights=(0.55, 0.15, 0.3))[0]
        exchange = _exchange(rng, family, functions, tasks)
        if not any(is_heldout_key(key) for key in exchange.keys):
            return exchange


def _exchange(
    rng: Random, family: str, functions: tuple[Function, ...], tasks: Tasks = TASKS
) -> Exchange:
    if family == "none":
        return _no_call(rng, functions, tasks)
    num_calls = rng.choice((2, 2, 2, 3)) if family == "parallel" else 1
    if num_calls > 1 and rng.random() < 0.5:
        called = [rng.choice(functions)] * num_calls
    else:
        called = [rng.choice(functions) for _ in range(num_calls)]
    values = [function.kind.values(rng) for function in called]
    calls = tuple(
        Call(function.name, function.arguments(given))
        for function, given in zip(called, values, strict=True)
    )
    outcomes = [_outcome(rng, f.kind, given) for f, given in zip(called, values, strict=True)]
    return Exchange(
        question=_joined(
            rng, [f.kind.ask(rng, given) for f, given in zip(called, values, strict=True)]
        ),
        calls=calls,
        results=tuple(result for result, _ in outcomes),
        answer=" ".join(answer for _, answer in outcomes),
        thought=f"I call {' and '.join(call.name for call in calls)}.",
        keys=tuple(f"call:{json.dumps(list(call.arguments.values()))}" for call in calls),
    )


def _joined(rng: Random, questions: list[str]) -> str:
    if len(questions) == 1:
        return questions[0]
    closed = [text if text[-1] in "?." else f"{text}." for text in questions]
    return rng.choice((" ", " ", " And: ", "\n")).join(closed)


def _outcome(rng: Random, kind: Kind, values: Values) -> tuple[str, str]:
    """A result as the client sends it, and the model's answer to it."""
    chance = rng.random()
    if chance < 0.12:
        failure = rng.choice(_FAILURES)
        form = rng.choice(("Error: {}", "error: {}", '{{"error": "{}"}}'))
        return form.format(failure), f"That did not work: {failure}."
    if chance < 0.2:
        return rng.choice(_NOTHING), "Nothing was found."
    result = kind.result(rng, values)
    if not isinstance(result, dict | list) and rng.random() < 0.25:
        result = {rng.choice(("result", "value", "answer", "output")): result}
    if isinstance(result, dict):
        parts = list(result.values())
    else:
        parts = result if isinstance(result, list) else [result]
    text = ", ".join(str(part) for part in parts)
    sent = result if isinstance(result, str) else json.dumps(result)
    return sent, f"The answer is {text}."


def _no_call(rng: Random, functions: tuple[Function, ...], tasks: Tasks) -> Exchange:
    """An exchange for which no declared function helps."""
    declared = [function.kind for function in functions]
    if rng.random() < 0.35:
        missing = [kind for kind in KINDS if kind not in declared and not _overlap(kind, declared)]
        kind = rng.choice(missing)
        values = kind.values(rng)
        return Exchange(
            question=kind.ask(rng, values),
            answer=UNKNOWN,
            thought="No function does that.",
            keys=(f"call:{json.dumps(values)}",),
        )
    while True:
        sample = smalltalk(rng) if rng.random() < 0.3 else training_sample(rng, tasks)
        if len(sample.turns) == 1 and not _may_need(sample, declared):
            turn = sample.turns[0]
            return Exchange(
                question=turn.user,
                answer=turn.assistant,
                thought="No function is needed.",
                keys=(f"none:{turn.user}",),
            )


def _overlap(kind: Kind, declared: list[Kind]) -> bool:
    """Whether a question of this kind can be answered without its function: by the model itself
    (calculations) or by a declared function about towns."""
    if kind.operation:
        return True
    return kind.is_about_towns and any(other.is_about_towns for other in declared)


def _may_need(sample: Sample, declared: list[Kind]) -> bool:
    if sample.family == "arithmetic":
        operation = sample.keys[0].split(":")[0]
        return any(kind.operation in (operation, "any") for kind in declared)
    if sample.family in ("town", "smalltalk", "outside"):
        # Small talk and out-of-scope messages include questions for functions (the time).
        return any(kind.is_about_towns or not kind.keys[0] for kind in declared)
    return False


def heldout_exchange(rng: Random, family: str) -> tuple[tuple[Function, ...], Exchange]:
    """Functions, half of the time with an unseen signature, and an unseen exchange."""
    while True:
        functions = _declare(rng, is_heldout=rng.random() < 0.5)
        exchange = _exchange(rng, family, functions)
        if any(is_heldout_key(key) for key in exchange.keys):
            return functions, exchange


def messages_of_exchange(exchange: Exchange) -> list[dict[str, Any]]:
    """Calls and results as chat messages."""
    calls = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(exchange.calls)
    ]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        *(
            {"role": "tool", "tool_call_id": f"call_{index}", "content": result}
            for index, result in enumerate(exchange.results)
        ),
    ]


def _heldout_questions(rng: Random, family: str, count: int) -> Iterator[Question]:
    for number in range(count):
        wanted = rng.choice(("single", "single", "parallel")) if family == "result" else family
        functions, exchange = heldout_exchange(rng, wanted)
        messages: list[dict[str, Any]] = [{"role": "user", "content": exchange.question}]
        answer = written_calls(exchange.calls) if exchange.calls else exchange.answer
        if family == "result":
            messages += messages_of_exchange(exchange)
            answer = exchange.answer
        yield Question(
            id=f"{family}-{number:02d}",
            family=family,
            messages=tuple(messages),
            answer=answer,
            tools=tuple(function.declared() for function in functions),
        )
