"""Estimate of which resource of a gateway saturates first as a fleet grows."""

from __future__ import annotations

from dataclasses import dataclass

_QUIET_REPORTS = 4.0
"""Reports per second from a worker whose gateways are slow; it merges the reports of 250 ms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Work of one gateway that tracks all workers, per second, and its cost."""

    workers: int
    decisions_per_s: float
    decision_s: float
    """CPU time per decision."""
    reports_per_s: float
    report_s: float
    failures_per_s: float
    failure_s: float
    """CPU time to remove a worker and to add one."""
    index_bytes: int
    memory_bytes: int
    """Memory of the machine in bytes."""

    @property
    def cores(self) -> dict[str, float]:
        """Cores needed for each kind of work; one gateway cannot use more than 1."""
        merged = min(self.reports_per_s, self.workers * _QUIET_REPORTS)
        return {
            "decisions": self.decisions_per_s * self.decision_s,
            "reports": self.reports_per_s * self.report_s,
            "reports_if_merged": merged * self.report_s,
            "failures": self.failures_per_s * self.failure_s,
        }

    @property
    def index_share(self) -> float:
        """Fraction of memory for the index, counted twice, because a growing table has its old
        cells in addition to the new ones."""
        return 2.0 * self.index_bytes / self.memory_bytes


def breaks_first(needs: Needs) -> str:
    """Description of one gateway's resource with the highest utilization."""
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
