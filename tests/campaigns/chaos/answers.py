"""A complete answer, assembled from a stream or a body, and the comparison of two answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_LOGPROB_TOLERANCE = 1e-4
"""Tolerance for rounding when numbers are printed; sums in a fixed order are bitwise equal."""


@dataclass(kw_only=True, slots=True)
class Choice:
    """One completion of an answer."""

    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[str, float | None]] = field(default_factory=list)
    """Tokens and their log-probabilities, if requested."""


@dataclass(kw_only=True, slots=True)
class Answer:
    """All completions of a request, keyed by index."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def take(self, message: Mapping[str, Any]) -> None:
        """Adds a chunk of a stream, or a complete body."""
        for chunk in message.get("choices") or ():
            choice = self.choices.setdefault(chunk["index"], Choice())
            message_part = chunk.get("delta") or chunk.get("message") or {}
            choice.text += chunk.get("text") or message_part.get("content") or ""
            choice.token_ids += chunk.get("token_ids") or ()
            choice.finish_reason = chunk.get("finish_reason") or choice.finish_reason
            choice.logprobs += _logprobs(chunk.get("logprobs") or {})
        usage = message.get("usage") or {}
        if usage:
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]


def difference(expected: Answer, found: Answer) -> str | None:
    """First difference between an answer and the expected one; None if they are equal."""
    if sorted(expected.choices) != sorted(found.choices):
        return f"choices {sorted(found.choices)} instead of {sorted(expected.choices)}"
    for index, choice in sorted(expected.choices.items()):
        if (problem := _choice_difference(choice, found.choices[index])) is not None:
            return f"choice {index}: {problem}"
    for name in ("prompt_tokens", "completion_tokens"):
        if getattr(expected, name) != getattr(found, name):
            return f"{name} {getattr(found, name)} instead of {getattr(expected, name)}"
    return None


def _choice_difference(expected: Choice, found: Choice) -> str | None:
    if expected.token_ids != found.token_ids:
        return _first_of("token ids", expected.token_ids, found.token_ids)
    if expected.text != found.text:
        return _first_of("text", expected.text, found.text)
    if expected.finish_reason != found.finish_reason:
        return f"finish_reason {found.finish_reason} instead of {expected.finish_reason}"
    if len(expected.logprobs) != len(found.logprobs):
        return f"{len(found.logprobs)} log-probabilities instead of {len(expected.logprobs)}"
    for place, (a, b) in enumerate(zip(expected.logprobs, found.logprobs, strict=True)):
        if a[0] != b[0] or not _is_close(a[1], b[1]):
            return f"log-probability {place} is {b} instead of {a}"
    return None


def _first_of(what: str, expected: Any, found: Any) -> str:
    pairs = zip(expected, found, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    near = slice(max(0, place - 2), place + 6)
    return (
        f"{what} differ from position {place} on: {found[near]!r} of {len(found)} instead of "
        f"{expected[near]!r} of {len(expected)}"
    )


def _logprobs(chunk: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    """Log-probabilities of a completion (parallel lists) or a chat (a list of objects)."""
    if "content" in chunk:
        return [(entry["token"], entry["logprob"]) for entry in chunk["content"] or ()]
    return list(zip(chunk.get("tokens") or (), chunk.get("token_logprobs") or (), strict=True))


def _is_close(expected: float | None, found: float | None) -> bool:
    if expected is None or found is None:
        return expected is found
    return math.isclose(expected, found, rel_tol=0.0, abs_tol=_LOGPROB_TOLERANCE)
