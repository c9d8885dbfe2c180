"""Benchmark `router --agents` runs closed-loop coding agents with and without the session gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, get_args

from cluster.bench.report import Result, at_least, checks_json, note
from cluster.bench.stats import estimate, mean, percentile
from deploy.benchmarks.routing.agents.closed_loop import ClosedLoop, Turn, fleet_shape
from deploy.benchmarks.routing.agents.load import AgentLoad, Pace
from deploy.benchmarks.routing.routers import OWN, find_routers

_HELD_GOAL = 0.75
_WARM_SHARE = 1 / 2
_GATE, _NO_GATE = "gate", "no gate"
"""Variants with the default policy. Other variants are named after their policy and have no
gate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentOptions:
    """Options of `router --agents`."""

    gaps: tuple[str, ...] = ()
    """Gaps between turns: unattended (86 % within a second) or people (recorded from Claude Code).
    Can be repeated. Default: both; with --real: unattended."""
    sessions: tuple[int, ...] = (3, 6, 12, 18)
    """Numbers of concurrent sessions, each measured separately. Two workers hold the contexts of
    about six sessions. Default with --real: 16."""
    policies: tuple[str, ...] = field(default=(), metadata={"flag": "--policy"})
    """Other routing policies to compare with, as in SimOptions."""
    seeds: int = 5
    """Number of simulations per case, each with its own seed."""
    first_seed: int = 1
    """Seed of the first simulation; later ones have consecutive seeds."""
    workers: int = 2
    """Number of workers."""
    host_share: float = 0.0
    """Size of the host-memory tier relative to the device's KV cache. Default with --real: 1, in
    variants with that tier."""
    minutes: float = 18.0
    """Simulated minutes; the first half is not measured. The initial sessions start partly done but
    uncached, and most of their long first prompts are computed in that half."""
    session_wait_s: float = 600.0
    """Maximum wait at the gate in seconds."""

    def __post_init__(self) -> None:
        if unknown := [one for one in self.gaps if one not in get_args(Pace)]:
            allowed = ", ".join(get_args(Pace))
            raise ValueError(f"--gaps: unknown pace {unknown[0]!r}: choose from {allowed}")
        for name in ("seeds", "workers", "minutes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name} must be greater than 0, got {getattr(self, name)}")
        if not self.sessions or min(self.sessions) < 1:
            raise ValueError(
                "--sessions must be one or more positive integers, such as `--sessions 8 16`, got "
                f"{' '.join(map(str, self.sessions)) or 'none'}"
            )


class AgentFigures(NamedTuple):
    """Metrics of one simulation. Times are in seconds and include the wait at the gate."""

    turns_per_minute: float
    hit_rate: float
    """Fraction of the prompt tokens that were cached."""
    unlimited_hit_rate: float
    """Hit rate of a cache that never evicts."""
    p50_ttft: float
    p99_ttft: float
    p50_running: float
    """Median time to first token, excluding the first turns of sessions."""
    longest_wait: float
    """Longest wait at the gate."""
    oldest: float
    """Longest wait for a first token at the end of the simulation."""


def run_agents(options: AgentOptions) -> Result:
    """Measures turns per minute and TTFT by number of sessions, with the gate, without it, and with
    other policies. Checks the fraction of the peak throughput that remains with more sessions."""
    rows: list[dict[str, Any]] = []
    checks = []
    others, notes = find_routers(options.policies)
    for text in notes:
        note(text)
    paces: Sequence[Pace] = get_args(Pace)
    for pace in [one for one in paces if not options.gaps or one in options.gaps]:
        peak = last = 0.0
        for number in options.sessions:
            for variant in (_GATE, _NO_GATE, *[entry.name for entry in others]):
                row = _row(options, pace, number, variant)
                rows.append({"gaps": pace, "sessions": number, "variant": variant, **row})
                turns = row["turns_per_minute"]
                note(f"{pace}, {number} sessions, {variant}: {turns:.1f} turns per minute")
                if variant == _GATE:
                    peak, last = max(peak, turns), turns
        name = f"{pace}_turns_of_peak"
        checks.append(at_least(name, last / peak if peak else 0.0, "of the peak", _HELD_GOAL))
    return {"seeds": options.seeds, "rows": rows, "checks": checks_json(checks)}


def simulate_agents(
    options: AgentOptions, pace: Pace, num_sessions: int, seed: int, variant: str = _GATE
) -> AgentFigures:
    """Metrics of one simulation; `variant` is "gate", "no gate" or the name of a policy."""
    (entry,), _ = find_routers((OWN if variant in (_GATE, _NO_GATE) else variant,))
    loop = ClosedLoop(
        AgentLoad(pace, seed),
        num_sessions,
        fleet_shape(options.workers, options.host_share),
        partial(entry.create, {}, seed),
        options.session_wait_s if variant == _GATE else 0.0,
    )
    horizon_s = 60.0 * options.minutes
    loop.run(horizon_s)
    warm_s = _WARM_SHARE * horizon_s
    measured = [turn for turn in loop.ended if turn.ended_at >= warm_s]
    return _figures(measured, (horizon_s - warm_s) / 60.0, loop.oldest_s)


def _figures(turns: Sequence[Turn], minutes: float, oldest_s: float) -> AgentFigures:
    tokens = sum(turn.prompt.num_tokens for turn in turns) or 1
    times = [turn.first_token_s for turn in turns]
    return AgentFigures(
        turns_per_minute=len(turns) / minutes,
        hit_rate=sum(turn.cached_tokens for turn in turns) / tokens,
        unlimited_hit_rate=sum(turn.num_repeated for turn in turns) / tokens,
        p50_ttft=percentile(times, 50.0),
        p99_ttft=percentile(times, 99.0),
        p50_running=percentile([t.first_token_s for t in turns if not t.is_first], 50.0),
        longest_wait=max((turn.wait_s for turn in turns), default=0.0),
        oldest=oldest_s,
    )


def _row(options: AgentOptions, pace: Pace, number: int, variant: str) -> dict[str, Any]:
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    found = [simulate_agents(options, pace, number, seed, variant) for seed in seeds]
    turns = estimate([one.turns_per_minute for one in found])
    means = {name: mean([getattr(one, name) for one in found]) for name in AgentFigures._fields}
    return {
        **means,
        "turns_ci": turns.half,
        "hit_of_unlimited": means["hit_rate"] / max(means["unlimited_hit_rate"], 1e-9),
        "longest_wait": max(one.longest_wait for one in found),
    }
