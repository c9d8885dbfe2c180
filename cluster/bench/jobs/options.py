"""Options of a benchmark job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.bench.jobs.slo import find_slo

JobKind = Literal["sweep", "goodput", "shared-prefix", "mooncake", "scenario", "soak"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Options of a job, in addition to those of its load. Field names are the flags."""

    kind: JobKind = "sweep"
    """Type of job. sweep: doubles the rate until throughput no longer keeps up; goodput: finds the
    highest rate with p99 latencies within the SLO; shared-prefix: prompts with shared prefixes,
    then prompts without; mooncake: replays a trace; scenario: steady, burst, mixed_priority and
    long_short in turn; soak: one rate for a long time."""
    rate: float = 1.0
    """Requests per second: in the first stage for sweep and goodput, the endpoint's sustainable
    rate for scenario, and in all stages otherwise."""
    duration: float = 30.0
    """Duration of each stage in seconds."""
    max_stages: int = 8
    """Maximum number of rates to try for sweep and goodput."""
    slo: str = "llama3.1-8b"
    """SLO: MLPerf's limits for a model, such as llama3.1-8b or, for its interactive scenario,
    llama3.1-8b-interactive; or TTFT_MS:TPOT_MS."""
    trace: str = ""
    """Mooncake trace file (.jsonl), for mooncake."""
    speed: float = 1.0
    """Replay speed relative to the recorded trace."""
    length_scale: float = 1.0
    """Factor for the lengths of the trace's prompts, blocks and completions; set it below 1 for
    models with a short context."""
    wait_ready_s: float = 0.0
    """Timeout in seconds for the endpoint's `/ready` to succeed before the load starts; 0 does not
    wait."""
    load_tasks: int = 0
    """Number of load generators, as Ray actors spread over the cluster; 0 generates the load in
    child processes."""
    out: str = ""
    """Folder for result.json and report.html, created if missing. By default
    rayfleet-job-KIND-DATE-TIME in the working directory."""
    overwrite: bool = False
    """Overwrite previous results in --out."""

    def __post_init__(self) -> None:
        for name in ("rate", "duration", "max_stages", "speed", "length_scale"):
            if getattr(self, name) <= 0:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be greater than 0, got {getattr(self, name)}")
        for name in ("load_tasks", "wait_ready_s"):
            if getattr(self, name) < 0:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must not be negative, got {getattr(self, name)}")
        if self.kind == "mooncake" and not self.trace:
            raise ValueError(
                "mooncake needs --trace FILE.jsonl: download FAST25-release/traces from "
                "github.com/kvcache-ai/Mooncake"
            )
        find_slo(self.slo)
