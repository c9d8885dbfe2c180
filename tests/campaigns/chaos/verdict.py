"""Checks of a chaos run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.bench.report import Check, at_least, at_most, exactly
from cluster.bench.stats import percentile
from tests.campaigns.chaos.faults import Fault
from tests.campaigns.chaos.kinds import RECOVERY_LIMITS_S, Part
from tests.campaigns.chaos.processes import Memory
from tests.campaigns.chaos.tally import Pauses, Tally

BEYOND_DETECTION_S = 2.0
"""Maximum seconds until another worker resumes a stream once the fault is detected."""
HUNG_RANK_S = 15.0
"""Maximum seconds until streams of a hung rank are resumed."""
MOST_GROWTH = 0.10
"""Maximum relative memory growth per process of a part; replaced processes start from zero."""


def judge(
    counts: Tally,
    faults: Sequence[Fault],
    pauses: Pauses,
    left_over: Mapping[str, float],
    growth: Mapping[str, float],
    extra_processes: int,
) -> list[Check]:
    """Checks of a run.

    Args:
        counts: outcomes of the requests.
        faults: injected faults.
        pauses: pauses of streams.
        left_over: nonzero loads of workers and gateways when there are no clients.
        growth: relative memory growth by part.
        extra_processes: number of processes in excess of those at the start.
    """
    num_lost = sum(fault.recovered is None for fault in faults)
    checks = [
        at_least("faults", len(faults), "faults", 1),
        at_least("completed", counts.completed, "requests", 1),
        exactly("failed", len(counts.failed), "requests", 0),
        exactly("wrong", len(counts.wrong), "requests", 0),
        exactly("not_recovered", num_lost, "faults", 0),
        exactly("leaked", len(left_over), "gauges", 0),
        exactly("extra_processes", extra_processes, "processes", 0),
        at_most(
            "pause_p99_beyond_detection",
            percentile(pauses.beyond, 99.0),
            "s",
            BEYOND_DETECTION_S,
        ),
    ]
    if pauses.of_hung_ranks:
        longest = max(pauses.of_hung_ranks)
        checks.append(at_most("hung_rank_longest_pause", longest, "s", HUNG_RANK_S))
    checks += [
        at_most(f"{kind}_recovery", longest, "s", RECOVERY_LIMITS_S[kind])
        for kind, longest in _longest_recoveries(faults).items()
    ]
    checks += [
        at_most(f"{part}_memory_growth", value, "share", MOST_GROWTH)
        for part, value in growth.items()
    ]
    return checks


def _longest_recoveries(faults: Sequence[Fault]) -> dict[str, float]:
    """Maximum recovery time in seconds by kind, for kinds with a limit."""
    longest: dict[str, float] = {}
    for fault in faults:
        if fault.kind in RECOVERY_LIMITS_S and fault.recovery_s is not None:
            longest[fault.kind] = max(longest.get(fault.kind, 0.0), fault.recovery_s)
    return longest


def memory_growth(before: Mapping[Part, Memory], after: Mapping[Part, Memory]) -> dict[str, float]:
    """Relative growth of memory per process for each part that exists before and after."""
    return {
        part.value: (after[part].mib / after[part].processes)
        / (before[part].mib / before[part].processes)
        - 1.0
        for part in before
        if part in after
    }
