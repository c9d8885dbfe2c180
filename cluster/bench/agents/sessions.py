"""Sessions of coding agents as loads: turns with appended tokens, answers and gaps."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from pathlib import Path
from typing import Final

import numpy as np

_PRODUCT_SHARES: Final = (0.6, 0.3, 0.1)
"""Fractions of the sessions per agent product; each product has its own system prompt with tools.
"""
_COLUMNS: Final = ("session_id", "round_idx", "prefix_len", "input_len", "output_len")


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTurn:
    """One request of a session."""

    num_appended: int
    """Tokens that the user or a tool adds to the context before the request."""
    num_output: int
    """Tokens of the answer, which stay in the context."""
    gap_s: float
    """Seconds from the end of the answer to the next turn, in which tools run or a person reads."""
    num_call: int = 0
    """Tokens of the tool call in the previous answer, whose result is appended; 0 for a message
    from the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSession:
    """One agent from its first request to its last."""

    product: int
    """Index of the system prompt; sessions with the same index share it."""
    num_system: int
    """Tokens of the system prompt."""
    turns: tuple[AgentTurn, ...]
    num_past: int = 0
    """Number of leading turns that the first request already contains, with random answers of the
    same lengths."""


def random_sessions(scale: float, seed: int) -> Iterator[AgentSession]:
    """Endless random sessions, with lengths and gaps like those of recorded coding agents.

    A system prompt has 8,000 to 20,000 tokens, the first message 2,000 to 8,000, the result of a
    tool 1,000 to 6,000, an answer 100 to 800. A session has 15 to 40 turns; 86 % of the turns
    follow within a second of the previous answer.

    Args:
        scale: factor for all lengths in tokens.
        seed: seed of all random numbers.
    """
    random = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> int:
        return max(1, round(scale * int(random.integers(low, high))))

    systems = [tokens(8_000, 20_000) for _ in _PRODUCT_SHARES]
    while True:
        product = int(random.choice(len(systems), p=_PRODUCT_SHARES))
        turns = [
            AgentTurn(
                num_appended=tokens(1_000, 6_000) if number else tokens(2_000, 8_000),
                num_output=max(1, round(scale * np.clip(random.lognormal(5.5, 0.6), 100, 800))),
                gap_s=random_gap_s(random),
            )
            for number in range(int(random.integers(15, 41)))
        ]
        yield AgentSession(product=product, num_system=systems[product], turns=tuple(turns))


def random_gap_s(random: np.random.Generator) -> float:
    """Seconds between turns of an unattended agent; 86 % of the gaps are shorter than a second."""
    place, exponent = random.random(), random.random()
    if place < 0.86:
        return float(random.uniform(0.1, 1.0))
    return float(10.0**exponent if place < 0.95 else 10.0 * 6.0**exponent)


def recorded_sessions(file: Path, scale: float) -> Iterator[AgentSession]:
    """The sessions of a file in order, repeated endlessly.

    Args:
        file: CSV as in TraceLab (https://github.com/uw-syfi/TraceLab): a row per turn with
            session_id, round_idx, prefix_len, input_len, output_len and, optionally,
            tool_wait_after_ms.
        scale: factor for all lengths in tokens.

    Raises:
        ValueError: the file cannot be read, or is not in this format.
    """
    try:
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
    except OSError as error:
        raise ValueError(f"cannot read --trace {file}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--trace {file} is not UTF-8 text: save it as UTF-8") from error
    missing = [name for name in _COLUMNS if rows and name not in rows[0]]
    if missing or not rows:
        what = f"column {missing[0]} is missing" if missing else "the file has no rows"
        raise ValueError(f"--trace {file}: {what}")
    try:
        return cycle(_sessions_of(rows, scale))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--trace {file}: every row must have integers in round_idx, input_len and output_len, "
            "and a number or nothing in tool_wait_after_ms"
        ) from error


def _sessions_of(rows: Sequence[dict[str, str]], scale: float) -> list[AgentSession]:
    """Sessions of rows; a row with round_idx 0 starts a new session, since ids are reused."""
    starts = 0
    numbers = []
    for row in rows:
        starts += int(row["round_idx"]) == 0
        numbers.append(starts)
    sessions = []
    for _, group in groupby(zip(numbers, rows, strict=True), key=lambda pair: pair[0]):
        turns = [
            AgentTurn(
                num_appended=max(1, round(scale * int(row["input_len"]))),
                num_output=max(1, round(scale * int(row["output_len"]))),
                gap_s=float(row.get("tool_wait_after_ms") or 0) / 1e3,
            )
            for _, row in group
        ]
        sessions.append(AgentSession(product=0, num_system=0, turns=tuple(turns)))
    return sessions
