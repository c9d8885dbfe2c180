"""Benchmark `router --agents --real`: coding agents on real fleets of paced workers, in turn."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any, Final, cast

import msgspec
import numpy as np
import uvloop

from cluster.bench.agents.loop import TOOL, AgentLoops, TurnRecord
from cluster.bench.client import open_session
from cluster.bench.command import run_measurement
from cluster.bench.datasets import Ids
from cluster.bench.prompts import PromptSpace
from cluster.bench.report import Check, Result, at_least, checks_json, exactly, note
from cluster.bench.serve import CHAT
from cluster.bench.stats import percentile, share, spread
from cluster.bench.turns import Turns, take_turns
from cluster.config import find_demo_model
from deploy.benchmarks.routing.agents.load import Pace
from deploy.benchmarks.routing.agents.recorded import recorded_agents
from deploy.benchmarks.routing.paced import Vocabulary, load
from deploy.benchmarks.routing.real.agent_options import (
    DEFAULT,
    GATE,
    GATE_HOST,
    RealAgentOptions,
)
from deploy.benchmarks.routing.real.routers import MODEL_NAME, own_fleet
from router.config import RoutingConfig

_GOAL: Final = 1.5
"""Minimum turns per minute of the best variant, relative to the default."""
_START_S: Final = 300.0
"""Time limit in seconds to start and stop a fleet."""
_PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
_FIELDS: Final = {
    "model": MODEL_NAME,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [
        {
            "type": "function",
            "function": {
                "name": TOOL,
                "description": "Runs a command in a shell.",
                "parameters": _PARAMETERS,
            },
        }
    ],
}


class AgentFigures(msgspec.Struct, frozen=True):
    """Metrics of one fleet for one number of sessions. Times are in seconds and include the wait at
    the gate."""

    turns_per_minute: float
    hit_rate: float
    """Fraction of the prompt tokens that were cached, as counted by the workers."""
    p50_running: float
    """Median time to first token, excluding the first turns of sessions."""
    p99_running: float
    longest_wait: float
    """Longest time to first token, or the age of the oldest unfinished turn at the end, whichever
    is longer."""
    mean_prompt_tokens: float
    num_turns: int
    num_failed: int


class WordSpace(PromptSpace):
    """Prompts that consist of plain words, so that the number of tokens is exact."""

    def __init__(self, words: Vocabulary) -> None:
        self._words = words

    @property
    def vocabulary(self) -> Ids:
        """Indices of all words."""
        return np.arange(len(self._words), dtype=np.int64)

    def as_text(self, token_ids: list[int]) -> str:
        """Text of the words with the given indices."""
        return self._words.text(np.array(token_ids, dtype=np.int64))


def run_agents_real(options: RealAgentOptions) -> Result:
    """Measures turns per minute, latencies and hit rates by number of sessions and variant, and
    checks the variants' order.

    Raises:
        ValueError: a measurement failed.
    """
    options = replace(options, model=options.model or find_demo_model())
    if options.variant:
        return {"figures": msgspec.to_builtins(_turn(options))}
    rows: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    checks: list[Check] = []
    for pace, number in product(options.gaps, options.sessions):
        one = replace(options, gaps=(pace,), sessions=(number,))
        case = {"gaps": pace, "sessions": number}
        turns = take_turns(
            {variant: partial(turn_of, one, variant) for variant in options.fleets}, options.rounds
        )
        rows += [{**case, **row} for row in table(turns)]
        ratios += [{**case, **row} for row in ratios_to_default(turns)]
        checks += order_checks(turns, f"{pace}_{number}")
    failed = sum(row["failed"] for row in rows)
    checks.append(exactly("failed_requests", failed, "requests", 0))
    return {
        **{name: getattr(options, name) for name in ("rounds", "num_workers", "compression")},
        "window_s": options.window_s,
        "rows": rows,
        "ratios": ratios,
        "failed": failed,
        "checks": checks_json(checks),
    }


def table(turns: Turns[AgentFigures]) -> list[dict[str, Any]]:
    """One row per variant: medians over the rounds, and the confidence interval of turns per
    minute."""
    rows = []
    for variant, rounds in turns.by_variant.items():
        names = [field.name for field in msgspec.structs.fields(AgentFigures)]
        medians = {
            name: percentile([getattr(one, name) for one in rounds], 50.0)
            for name in names
            if not name.startswith("num_")
        }
        found = spread([one.turns_per_minute for one in rounds])
        rows.append(
            {
                "variant": variant,
                **medians,
                "interval_low": found.interval_low,
                "interval_high": found.interval_high,
                "turns_rounds": " ".join(f"{one.turns_per_minute:.1f}" for one in rounds),
                "turns": sum(one.num_turns for one in rounds),
                "failed": sum(one.num_failed for one in rounds),
            }
        )
    return rows


def ratios_to_default(turns: Turns[AgentFigures]) -> list[dict[str, Any]]:
    """Turns per minute of the other variants relative to the default, paired by round."""
    if DEFAULT not in turns.by_variant:
        return []
    others = [variant for variant in turns.by_variant if variant != DEFAULT]
    return [turns.comparison(variant, DEFAULT, _turns_per_minute) for variant in others]


def order_checks(turns: Turns[AgentFigures], start: str) -> list[Check]:
    """Checks of the turns per minute: the variants must rank as in the simulation, and the best one
    must exceed the default by `_GOAL`."""

    def ratio(variant: str, baseline: str) -> float:
        return turns.ratio(variant, baseline, _turns_per_minute).median

    checks = [
        at_least(f"{start}_{better}_of_{worse}".replace("-", "_"), ratio(better, worse), "x", 1.0)
        for worse, better in ((DEFAULT, GATE), (GATE, GATE_HOST))
        if {worse, better} <= turns.by_variant.keys()
    ]
    others = [variant for variant in turns.by_variant if variant != DEFAULT]
    if others and DEFAULT in turns.by_variant:
        best = max(ratio(variant, DEFAULT) for variant in others)
        checks.append(at_least(f"{start}_best_of_default", best, "x", _GOAL))
    return checks


def _turns_per_minute(one: AgentFigures) -> float:
    return one.turns_per_minute


def figures(ended: Sequence[TurnRecord], oldest_s: float, window_s: float) -> AgentFigures:
    """Metrics of the turns that ended in the second half of the window.

    Args:
        ended: all turns.
        oldest_s: age of the oldest unfinished request at the end of the window.
        window_s: length of the window.
    """
    measured = [turn for turn in ended if turn.ended_at >= window_s / 2]
    done = [turn.record for turn in measured if not turn.record.error]
    later = [turn.record.ttft for turn in measured if not turn.record.error and not turn.is_first]
    num_prompt = sum(record.prompt_len for record in done)
    return AgentFigures(
        turns_per_minute=120.0 * len(done) / window_s,
        hit_rate=share(sum(record.cached_tokens for record in done), num_prompt),
        p50_running=percentile(later, 50.0),
        p99_running=percentile(later, 99.0),
        longest_wait=max([oldest_s, *(record.ttft for record in done)]),
        mean_prompt_tokens=share(num_prompt, len(done)),
        num_turns=len(done),
        num_failed=sum(bool(turn.record.error) for turn in ended),
    )


def _turn(options: RealAgentOptions) -> AgentFigures:
    """Starts a fleet and runs closed loops for one number of sessions."""
    routing = RoutingConfig(max_session_wait_s=options.max_wait_s)
    with own_fleet(options.model, options.shape, 1.0, routing) as base_url:
        ended, oldest_s = uvloop.run(drive_agents(options, base_url))
    for reason in sorted({turn.record.error for turn in ended if turn.record.error})[:3]:
        note(f"failed: {reason}")
    return figures(ended, oldest_s, options.window_s)


async def drive_agents(options: RealAgentOptions, base_url: str) -> tuple[list[TurnRecord], float]:
    """Runs the sessions; returns all turns, and the age in seconds of the oldest unfinished
    request."""
    (num_sessions,), (pace,) = options.sessions, options.gaps
    space = WordSpace(Vocabulary(load(options.model)))
    seed = options.first_seed
    sessions = recorded_agents(options.compression, seed, num_sessions, cast(Pace, pace))
    async with open_session({}) as session:
        loops = AgentLoops(session, base_url + CHAT, _FIELDS, sessions, space, None, seed)
        oldest_s = await loops.run(num_sessions, options.window_s)
    return loops.ended, oldest_s


def turn_of(options: RealAgentOptions, variant: str, number: int) -> AgentFigures:
    """Metrics of one variant and round, measured in a separate process."""
    one = replace(options, variant=variant, first_seed=options.first_seed + number)
    command = [sys.executable, "-m", "deploy.benchmarks", "router", "--agents", "--real", "--json"]
    what = f"the turn of {variant}"
    result = run_measurement([*command, *_flags(one)], what, _START_S + options.window_s)
    known = {
        name: math.nan if value is None else value for name, value in result["figures"].items()
    }
    found = msgspec.convert(known, AgentFigures)
    note(
        f"{options.sessions[0]} sessions ({options.gaps[0]}), {variant}, round {number}: "
        f"{found.turns_per_minute:.1f} turns per minute, hit rate {found.hit_rate:.3f}, "
        f"TTFT p50 {found.p50_running:.2f} s"
    )
    return found


def _flags(options: RealAgentOptions) -> list[str]:
    values = asdict(options) | {"sessions": options.sessions[0], "gaps": options.gaps[0]}
    return [
        word
        for name, value in values.items()
        if name not in ("fleets", "rounds")
        for word in ("--" + name.replace("_", "-"), str(value))
    ]
