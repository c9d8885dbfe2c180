"""Options of `python -m deploy.benchmarks scenarios`; does not import what runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from worker.config import EngineConfig

ScenarioName = Literal["steady", "burst", "mixed_priority", "long_short"]
SCENARIOS: tuple[ScenarioName, ...] = ("steady", "burst", "mixed_priority", "long_short")
LEAST_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ScenarioOptions:
    """Options of traffic and fleets. Field names are the flags."""

    scenario: tuple[ScenarioName, ...] = ()
    """Scenarios to run; none for all. steady: constant rate and default priority; burst: a rate
    that rises fortyfold and falls again; mixed_priority: overload with several priorities;
    long_short: a few long prompts between short ones."""
    workers: int = 2
    """Worker groups of each fleet."""
    rps: float = 0.0
    """Requests per second, for burst at its peak. 0 measures the rate that the fleet sustains, and
    takes 0.6 times that (steady, long_short), 2 times (burst) or 1.3 times (mixed_priority)."""
    duration: float = 20.0
    """Seconds in which requests are sent, per round and fleet."""
    rounds: int = LEAST_ROUNDS
    """Turns of each fleet; goals are checked from 3 on."""
    seed: int = 0
    """Seed of arrivals and prompts, from which each round derives its own."""
    compare_fifo: bool = False
    """Compare with a fleet that is first come, first served, with round-robin routing and without
    priorities."""
    speculative_compare: bool = False
    """Compare with a fleet that drafts (--speculative-method, default ngram), under traffic of
    several priorities."""
    plot: str = ""
    """Folder for a PNG per scenario."""

    def __post_init__(self) -> None:
        if self.workers < 1 or self.rounds < 1:
            raise ValueError("--workers and --rounds must be at least 1")
        if self.rps < 0.0 or self.duration <= 0.0:
            raise ValueError("--rps must not be negative, --duration must be above 0")
        if self.compare_fifo and self.speculative_compare:
            raise ValueError("--compare-fifo and --speculative-compare: one at a time")

    @property
    def scenarios(self) -> tuple[ScenarioName, ...]:
        """Scenarios to run."""
        return self.scenario or SCENARIOS


@dataclass(frozen=True, kw_only=True, slots=True)
class ScenarioRun:
    """Options with the engine configuration that the fleets are derived from."""

    options: ScenarioOptions
    engine: EngineConfig
