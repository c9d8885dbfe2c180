"""Options of a benchmark job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.bench.jobs.slo import find_slo

JobKind = Literal["sweep", "goodput", "shared-prefix", "mooncake", "scenario", "soak"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Options of one job, besides those of its load. Field names are the flags."""

    kind: JobKind = "sweep"
    """Kind of job. sweep: rates that double until the throughput does not follow; goodput: highest
    rate whose p99 keeps the SLO; shared-prefix: prompts with shared prefixes, then without;
    mooncake: replay of a trace; scenario: steady, burst, mixed_priority and long_short in turn;
    soak: one rate for a long time."""
    rate: float = 1.0
    """Requests per second: of the first stage for sweep and goodput, and for scenario the rate that
    the endpoint sustains."""
    duration: float = 30.0
    """Seconds of traffic per stage."""
    max_stages: int = 8
    """Most rates that sweep and goodput try."""
    slo: str = "llama3.1-8b"
    """MLPerf's limits for a model, with -interactive for the tighter ones, or TTFT_MS:TPOT_MS."""
    trace: str = ""
    """Trace file of Mooncake (.jsonl) for mooncake."""
    speed: float = 1.0
    """Factor by which the trace is replayed faster than it was recorded."""
    length_scale: float = 1.0
    """Factor of the lengths of the trace's prompts, blocks and completions; below 1 for models with
    a short context."""
    wait_ready_s: float = 0.0
    """Seconds to wait for success of the endpoint's `/ready` before anything is sent, as after the
    start of a fleet. 0 does not ask."""
    load_tasks: int = 0
    """Number of load generators, which are Ray actors spread over the cluster; 0 sends the load
    from child processes of this one."""
    out: str = ""
    """Folder for result.json and report.html, created if it is missing; by default a new one in the
    working directory, named rayfleet-job-KIND-DATE-TIME."""
    overwrite: bool = False
    """Replace earlier results in --out."""

    def __post_init__(self) -> None:
        for name in ("rate", "duration", "max_stages", "speed", "length_scale"):
            if getattr(self, name) <= 0:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be above 0, got {getattr(self, name)}")
        for name in ("load_tasks", "wait_ready_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must not be negative")
        if self.kind == "mooncake" and not self.trace:
            raise ValueError(
                "mooncake needs --trace FILE.jsonl: fetch FAST25-release/traces of "
                "kvcache-ai/Mooncake"
            )
        find_slo(self.slo)
