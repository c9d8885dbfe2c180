"""Training conversations and held-out questions, sampled from the task families by seed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from deploy.models.sample import Sample, Turn
from deploy.models.tasks import EVALUATED, TASKS, Task, Tasks

HELDOUT_SEED: Final = 2027
QUESTIONS_PER_FAMILY: Final = 25

SYSTEM_PROMPTS: Final = (
    *("You are a helpful assistant.", "You are demo, a small and friendly model."),
    *("Answer briefly.", "You are a careful assistant. Answer exactly.", "Be concise."),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One training document: consecutive exchanges, with or without a system message."""

    system: str | None
    turns: tuple[Turn, ...]
    thought: str | None = None
    """Reasoning before the last answer; None if thinking is disabled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A held-out question and its only correct answer."""

    id: str
    family: str
    messages: tuple[dict[str, Any], ...]
    answer: str
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the request declares, in OpenAI's format."""


def training_sample(rng: Random, tasks: Tasks = TASKS) -> Sample:
    """An exchange that is not held out."""
    makers = [task for task, _ in tasks]
    shares = [share for _, share in tasks]
    while True:
        sample = rng.choices(makers, weights=shares)[0](rng)
        if not sample.is_heldout():
            return sample


def training_conversations(rng: Random, tasks: Tasks = TASKS) -> Iterator[Conversation]:
    """Infinite stream of conversations: most have one exchange, some have many."""
    while True:
        parts = [training_sample(rng, tasks) for _ in range(_num_parts(rng))]
        turns = tuple(turn for part in parts for turn in part.turns)
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.15 else None
        yield Conversation(system=system, turns=turns)


def heldout_questions(per_family: int = QUESTIONS_PER_FAMILY) -> list[Question]:
    """Held-out questions for evaluation; the same list on every call."""
    rng = Random(HELDOUT_SEED)
    return [question for task in EVALUATED for question in _questions_of(task, rng, per_family)]


def questions_path(directory: Path) -> Path:
    """Path of a checkpoint's questions, next to its folder ``directory``."""
    return directory.with_name(f"{directory.name}_heldout.jsonl")


def tool_questions_path(directory: Path) -> Path:
    """Path of a checkpoint's questions with functions, next to its folder."""
    return directory.with_name(f"{directory.name}_heldout_tools.jsonl")


def first_words_path(directory: Path) -> Path:
    """Path of a checkpoint's other questions: messages unrelated to its training data, and lists to
    sort."""
    return directory.with_name(f"{directory.name}_heldout_first_words.jsonl")


def write_questions(path: Path, questions: list[Question]) -> None:
    """Writes one JSON object per line: id, family, messages, answer, and tools if declared."""
    rows = (
        {"id": q.id, "family": q.family, "messages": list(q.messages), "answer": q.answer}
        | ({"tools": list(q.tools)} if q.tools else {})
        for q in questions
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_questions(path: Path) -> list[Question]:
    """Reads a file written by `write_questions`."""
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return [
        Question(
            **{**row, "messages": tuple(row["messages"]), "tools": tuple(row.get("tools", ()))}
        )
        for row in rows
    ]


def messages_of(turns: tuple[Turn, ...], system: str | None = None) -> list[dict[str, str]]:
    """Turns as chat messages."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.assistant})
    return messages


def _num_parts(rng: Random) -> int:
    kind = rng.random()
    if kind < 0.65:
        return 1
    if kind < 0.93:
        return rng.randrange(2, 5)
    return rng.randrange(5, 13) if kind < 0.99 else rng.randrange(13, 40)


def _questions_of(task: Task, rng: Random, num_questions: int) -> Iterator[Question]:
    seen: list[tuple[Turn, ...]] = []
    while len(seen) < num_questions:
        sample = task(rng)
        if not sample.is_heldout() or sample.turns in seen:
            continue
        *messages, answer = messages_of(sample.turns)
        yield Question(
            id=f"{sample.family}-{len(seen):02d}",
            family=sample.family,
            messages=tuple(messages),
            answer=answer["content"],
        )
        seen.append(sample.turns)
