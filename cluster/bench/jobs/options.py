"""The options of a benchmark job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.bench.jobs.slo import find_slo

JobKind = Literal["sweep", "goodput", "shared-prefix", "mooncake", "scenario", "soak"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """One job, beside the flags of its load. Field names are the flags."""

    kind: JobKind = "sweep"
    """sweep: rates that double until the throughput no longer follows; goodput: the highest rate
    whose p99 keeps the SLO; shared-prefix: prompts with prefixes in common, then without; mooncake:
    a trace; scenario: steady, burst, mixed_priority and long_short in turn; soak: one rate for
    long."""
    rate: float = 1.0
    """Requests per second: the first one of sweep and goodput; what the endpoint sustains for
    scenario."""
    duration: float = 30.0
    """Seconds of traffic per stage; of all of it for soak."""
    max_stages: int = 8
    """Most rates that sweep and goodput try."""
    slo: str = "llama3.1-8b"
    """MLPerf preset by model, with -interactive for its tighter one, or TTFT_MS:TPOT_MS."""
    trace: str = ""
    """Mooncake's file (.jsonl) for mooncake."""
    speed: float = 1.0
    """How many times faster than it was recorded the trace is played."""
    length_scale: float = 1.0
    """Factor on the lengths of the trace's prompts, their blocks and completions: models with short
    contexts take part with less than 1."""
    wait_ready_s: float = 0.0
    """Seconds to wait for the endpoint's `/ready` to say yes before anything is sent: a fleet that
    was just started loads its models first. 0 does not ask."""
    load_tasks: int = 0
    """Load generators, each a process of Ray's somewhere in the cluster; 0 keeps the load in
    processes of this one."""
    out: str = ""
    """Folder for result.json and report.html, made where it is missing; empty means a new one here,
    named rayfleet-job-KIND-DATE-TIME."""
    overwrite: bool = False
    """Replace the results that --out holds."""

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
