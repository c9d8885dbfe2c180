"""Options of `python -m deploy.benchmarks scenarios`, without its implementation."""

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
    """Scenarios to run; all if unset. steady: constant rate and default priority; burst: the rate
    rises fortyfold and falls again; mixed_priority: overload with several priorities; long_short: a
    few long prompts among short ones."""
    workers: int = 2
    """Number of workers of each fleet."""
    rps: float = 0.0
    """Requests per second (for burst, at its peak). 0 measures the sustainable rate and uses 0.6
    times (steady, long_short), 2 times (burst) or 1.3 times (mixed_priority) this rate."""
    duration: float = 20.0
    """Duration of the load in seconds, per round and fleet."""
    rounds: int = LEAST_ROUNDS
    """Number of rounds per fleet; goals are checked if there are at least 3."""
    seed: int = 0
    """Seed of arrivals and prompts, from which the seed of each round is derived."""
    compare_fifo: bool = False
    """Compare with a first-come, first-served fleet with round-robin routing and without
    priorities."""
    speculative_compare: bool = False
    """Compare with a fleet with speculative decoding (--speculative-method, default ngram), under
    traffic of several priorities."""
    plot: str = ""
    """Folder for a PNG file per scenario."""

    def __post_init__(self) -> None:
        if self.workers < 1 or self.rounds < 1:
            raise ValueError(
                f"--workers and --rounds must be at least 1, got {self.workers} and {self.rounds}"
            )
        if self.rps < 0.0 or self.duration <= 0.0:
            raise ValueError(
                "--rps must not be negative and --duration must be greater than 0, got "
                f"{self.rps:g} and {self.duration:g}"
            )
        if self.compare_fifo and self.speculative_compare:
            raise ValueError("--compare-fifo and --speculative-compare are mutually exclusive")

    @property
    def scenarios(self) -> tuple[ScenarioName, ...]:
        """Scenarios to run."""
        return self.scenario or SCENARIOS


@dataclass(frozen=True, kw_only=True, slots=True)
class ScenarioRun:
    """Options, with the engine configuration of the fleets."""

    options: ScenarioOptions
    engine: EngineConfig
