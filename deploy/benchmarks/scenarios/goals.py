"""Goals of the comparison with a first-come, first-served fleet, per scenario."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.bench.jobs.scenario_options import ScenarioName
from cluster.bench.report import Check, at_least, at_most

_AT_MOST: dict[str, float] = {
    "steady_ttft_p50_ratio": 1.02,
    "steady_ttft_p99_ratio": 1.02,
    "steady_itl_p50_ratio": 1.02,
    "steady_itl_p99_ratio": 1.02,
    "steady_slo_miss_difference": 0.02,
    "burst_ttft_p99_ratio": 0.87,
    "burst_slo_miss_difference": 0.0,
    "burst_spec_ttft_p99_ratio": 1.03,
    "mixed_ttft_p50_ratio": 0.75,
    "mixed_urgent_ttft_p99_excess_steps": 3.0,
    "mixed_urgent_slo_miss": 0.01,
}
_AT_LEAST: dict[str, float] = {
    "steady_throughput_ratio": 0.98,
    "burst_throughput_ratio": 1.0,
    "mixed_throughput_ratio": 0.97,
}


def prefix(scenario: ScenarioName) -> str:
    """Prefix of the names of a scenario's values."""
    return "mixed_" if scenario == "mixed_priority" else f"{scenario}_"


def scenario_checks(values: Mapping[str, float]) -> list[Check]:
    """Checks of the values that have a goal."""
    checks = [
        at_most(n, values[n], _unit(n), limit) for n, limit in _AT_MOST.items() if n in values
    ]
    return checks + [at_least(n, values[n], "", g) for n, g in _AT_LEAST.items() if n in values]


def _unit(name: str) -> str:
    return "steps" if name.endswith("_steps") else ""
