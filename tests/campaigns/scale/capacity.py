"""Which resource of one gateway is spent first as a fleet grows."""

from __future__ import annotations

from dataclasses import dataclass

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
