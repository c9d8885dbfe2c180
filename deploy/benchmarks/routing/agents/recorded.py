"""Recorded sessions of coding agents, with all lengths and gaps divided by a factor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from cluster.bench.agents.sessions import AgentSession, AgentTurn, random_gap_s
from deploy.benchmarks.routing.agents.load import Pace, people_gaps

_RECORDED = Path(__file__).parent / "recorded_turns.json"
_SYSTEM_TOKENS = 15_186
"""Length in tokens of the system prompt, including tools: the median of the recorded sessions."""
_CALL_SHARE = 0.25
"""Fraction of an answer's tokens that belong to tool calls. It approximates the median turn of
TraceLab's example session (https://github.com/uw-syfi/TraceLab), at four characters per token."""


def recorded_agents(
    compression: float, seed: int, num_started: int, pace: Pace = "unattended"
) -> Iterator[AgentSession]:
    """Infinite stream of sessions in random order, all with the same system prompt.

    Args:
        compression: divisor for lengths and gaps.
        seed: seed of all random numbers.
        num_started: number of initial sessions that start partly done.
        pace: gaps between turns, as in AgentLoad.
    """
    random = np.random.default_rng(seed)
    recorded: list[list[tuple[int, int, int]]] = json.loads(_RECORDED.read_text())["sessions"]

    def scaled(tokens: float) -> int:
        return max(1, round(tokens / compression))

    unattended = iter(partial(random_gap_s, random), None)
    number = 0
    while True:
        for place in random.permutation(len(recorded)).tolist():
            turns, num_call = [], 0
            gaps = people_gaps(random) if pace == "people" else unattended
            for num_appended, num_answer, by_person in recorded[place]:
                turns.append(
                    AgentTurn(
                        num_appended=scaled(num_appended),
                        num_output=scaled((1.0 - _CALL_SHARE) * num_answer),
                        gap_s=next(gaps) / compression,
                        num_call=0 if by_person else num_call,
                    )
                )
                num_call = scaled(_CALL_SHARE * num_answer)
            yield AgentSession(
                product=0,
                num_system=scaled(_SYSTEM_TOKENS),
                turns=tuple(turns),
                num_past=int(random.integers(len(turns))) if number < num_started else 0,
            )
            number += 1
