"""What breaks first as a fleet grows, and how it would be cut into zones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cluster.bench.report import Result

_BUSIEST = 0.5
"""Of a gateway's core and of its memory: what more it needs at times is not known here."""
_QUIET_REPORTS = 4.0
"""Reports per second of a worker whose gateways are slow: it merges those of 250 ms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What one gateway that knows all workers has to do per second, and what that takes."""

    workers: int
    decisions_per_s: float
    decision_s: float
    """CPU time of one."""
    reports_per_s: float
    report_s: float
    failures_per_s: float
    failure_s: float
    """To lose a worker and to take it in again."""
    index_bytes: int
    memory_bytes: int
    """Of the machine."""

    @property
    def cores(self) -> dict[str, float]:
        """Cores that each kind of work takes; above 1 one gateway cannot do it."""
        merged = min(self.reports_per_s, self.workers * _QUIET_REPORTS)
        return {
            "decisions": self.decisions_per_s * self.decision_s,
            "reports": self.reports_per_s * self.report_s,
            "reports_if_merged": merged * self.report_s,
            "failures": self.failures_per_s * self.failure_s,
        }

    @property
    def index_share(self) -> float:
        """Of the memory, twice: while it grows a table has its old cells beside the new ones."""
        return 2.0 * self.index_bytes / self.memory_bytes


def breaks_first(needs: Needs) -> str:
    """The resource of one gateway that this fleet fills most, in words."""
    cores = needs.cores
    words = {
        "decisions": f"decisions: {cores['decisions']:.2f} cores of 1 "
        f"at {needs.decisions_per_s:,.0f} per s",
        "reports": f"reports of steps: {cores['reports']:.2f} cores of 1 at "
        f"{needs.reports_per_s:,.0f} per s, {cores['reports_if_merged']:.2f} if workers merge them",
        "failures": f"workers that fail: {cores['failures']:.2f} cores of 1",
        "memory": f"memory: {needs.index_share:.0%} of the machine's while the index grows",
    }
    shares = {name: cores[name] for name in ("decisions", "reports", "failures")}
    shares["memory"] = needs.index_share
    return words[max(shares, key=lambda name: shares[name])]


def sharding(needs: Needs) -> Result:
    """Zones and gateways that keep every gateway at half a core and half its memory.

    A zone's gateways attach to its workers alone: reports, failures and the index are divided by
    the zones. Decisions are divided by all gateways.
    """
    cores = needs.cores
    per_zone = cores["reports"] + cores["failures"]
    # A quarter of a core is left for decisions where zones are cut for the sake of reports.
    zones = max(1, math.ceil(per_zone / (0.5 * _BUSIEST)), math.ceil(needs.index_share / _BUSIEST))
    left = _BUSIEST - per_zone / zones
    gateways = max(1, math.ceil(cores["decisions"] / zones / left))
    return {
        "zones": zones,
        "workers_per_zone": -(-needs.workers // zones),
        "gateways_per_zone": gateways,
        "cores_per_gateway": per_zone / zones + cores["decisions"] / (zones * gateways),
        "index_gib_per_gateway": needs.index_bytes / zones / 2**30,
    }


def memory_bytes() -> int:
    """Of this machine, as the kernel counts it."""
    with open("/proc/meminfo") as lines:
        fields: dict[str, Any] = dict(line.split(":") for line in lines)
    return int(fields["MemTotal"].split()[0]) * 1024
