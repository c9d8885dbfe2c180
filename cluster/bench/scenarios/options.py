"""The options of `rayfleet bench scenarios`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from worker.config import EngineConfig

ScenarioName = Literal["steady", "burst", "mixed_priority", "long_short"]
SCENARIOS: tuple[ScenarioName, ...] = ("steady", "burst", "mixed_priority", "long_short")
LEAST_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ScenarioOptions:
    """Traffic and fleets. Field names are the flags."""

    scenario: tuple[ScenarioName, ...] = ()
    """Which, none for all. steady: an even load of default urgency; burst: a rate that goes up
    fortyfold and comes down again; mixed_priority: more than the fleet can carry, of all urgencies;
    long_short: a few long prompts between short ones."""
    workers: int = 2
    """Worker groups of each fleet."""
    rps: float = 0.0
    """Requests per second, in a burst at its peak; 0 measures what the fleet sustains, and takes
    0.6 times that (steady, long_short), 2 times (the peak of burst), 1.3 times (mixed_priority)."""
    duration: float = 20.0
    """Seconds in which requests are sent, per round and fleet."""
    rounds: int = LEAST_ROUNDS
    """Turns of each fleet; with --compare-fifo at least 3."""
    seed: int = 0
    """Seed of arrivals and prompts; every round has its own."""
    compare_fifo: bool = False
    """Run a second fleet in turn: first come first served, round-robin routing, no priorities."""
    speculative_compare: bool = False
    """Run a second fleet in turn that drafts (--speculative-method, default ngram), under traffic
    of all urgencies."""
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
        """The scenarios asked for."""
        return self.scenario or SCENARIOS


@dataclass(frozen=True, kw_only=True, slots=True)
class ScenarioRun:
    """Options with the engine that both fleets share."""

    options: ScenarioOptions
    engine: EngineConfig
