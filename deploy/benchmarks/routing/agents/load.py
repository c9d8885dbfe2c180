"""Sessions of coding agents: growing contexts, sub-agents, and gaps between turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = NDArray[np.int32]
Pace = Literal["unattended", "people"]

_RECORDED = Path(__file__).parent / "recorded_gaps.json"
_VOCAB = 100_000
_PRODUCTS = (0.6, 0.3, 0.1)
"""Fraction of the sessions for each of three agent products, which have different system prompts
and tools."""
_MAX_GAP_S = 300.0
"""Maximum gap in seconds: recorded gaps are capped, so that all sessions are active within minutes.
"""
_FAN_OUT = 0.04
"""Fraction of the turns that start two to four sub-agents."""
_ABANDONED = 0.01
"""Fraction of the turns after which a session is abandoned without notice."""


@cache
def _recorded() -> list[list[float]]:
    gaps: list[list[float]] = json.loads(_RECORDED.read_text())["gaps"]
    return gaps


def people_gaps(random: np.random.Generator) -> Iterator[float]:
    """Seconds between the turns of one recorded session, from a random turn on, repeated endlessly.

    They include the time that people take to read and write, capped at five minutes.
    """
    gaps = _recorded()[int(random.integers(len(_recorded())))]
    first = int(random.integers(len(gaps)))
    return cycle([max(min(gap, _MAX_GAP_S), 0.1) for gap in gaps[first:] + gaps[:first]])


class AgentSession:
    """One agent with its context."""

    def __init__(self, name: str, context: Tokens, num_turns: int, num_shared: int) -> None:
        self.name = name
        """Session id in requests; sub-agents have the same id."""
        self.context = context
        self.num_turns = num_turns
        """Number of turns until the session ends."""
        self.num_shared = num_shared
        """Number of leading context tokens that all sessions of the same product share."""
        self.turn = 0
        self.num_before = 0
        """Length of the last prompt, which the next prompt repeats."""
        self.parent: AgentSession | None = None
        self.num_children = 0
        """Number of sub-agents that the session is waiting for."""
        self.gaps: Iterator[float] | None = None
        """Recorded seconds between turns, repeated endlessly; used only at the pace "people"."""


class AgentLoad:
    """Random sessions whose lengths and gaps resemble those of recorded coding agents.

    Args:
        pace: "unattended": 86 % of the turns come within a second of the last one, 95 % within ten;
            "people": gaps of recorded sessions, in their order.
        seed: seed of all random numbers.
    """

    def __init__(self, pace: Pace, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._pace = pace
        self._num_sessions = 0
        self._products = [self._tokens(8_000, 20_000) for _ in _PRODUCTS]
        self._sub_products = [self._tokens(4_000, 8_000) for _ in _PRODUCTS]

    def session(self, *, started: bool = False) -> AgentSession:
        """A new session; if `started`, some of its turns are already done."""
        product = int(self.random.choice(len(_PRODUCTS), p=_PRODUCTS))
        system = self._products[product]
        parts = [system, self._tokens(2_000, 8_000)]
        num_turns = int(self.random.integers(15, 41))
        num_done = int(self.random.integers(0, 25)) if started else 0
        parts += [self._growth() for _ in range(num_done)]
        self._num_sessions += 1
        made = AgentSession(
            f"s{self._num_sessions}",
            np.concatenate(parts),
            max(num_turns - num_done, 1),
            len(system),
        )
        if self._pace == "people":
            made.gaps = people_gaps(self.random)
        return made

    def sub_agents(self, parent: AgentSession) -> list[AgentSession]:
        """Sub-agents that the parent starts at the end of a turn; usually empty."""
        if parent.parent is not None or self.random.random() >= _FAN_OUT:
            return []
        children = []
        for _ in range(int(self.random.integers(2, 5))):
            system = self._sub_products[int(self.random.choice(len(_PRODUCTS), p=_PRODUCTS))]
            context = np.concatenate([system, self._tokens(500, 2_000)])
            num_turns = int(self.random.integers(3, 9))
            child = AgentSession(parent.name, context, num_turns, len(system))
            child.parent, child.gaps = parent, parent.gaps
            children.append(child)
        parent.num_children = len(children)
        return children

    def num_output(self) -> int:
        """Number of tokens in an answer."""
        return int(np.clip(self.random.lognormal(5.5, 0.6), 100, 800))

    def ends(self, session: AgentSession) -> bool:
        """Whether the session ends with this turn."""
        return session.turn >= session.num_turns or self.random.random() < _ABANDONED

    def answered(self, session: AgentSession, answer: Tokens) -> None:
        """Appends an answer to the context."""
        session.turn += 1
        session.num_before = len(session.context)
        session.context = np.concatenate([session.context, answer])

    def grow(self, session: AgentSession) -> float:
        """Appends tool results to the context; returns the seconds until the next turn."""
        session.context = np.concatenate([session.context, self._growth()])
        if session.gaps is not None:
            return next(session.gaps)
        place = self.random.random()
        if place < 0.86:
            return float(self.random.uniform(0.1, 1.0))
        exponent = self.random.random()
        return float(10.0**exponent if place < 0.95 else 10.0 * 6.0**exponent)

    def _growth(self) -> Tokens:
        return self._tokens(1_000, 6_000)

    def _tokens(self, low: int, high: int) -> Tokens:
        count = int(self.random.integers(low, high))
        return self.random.integers(100, _VOCAB, count, dtype=np.int32)
