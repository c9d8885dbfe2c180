"""Options of `make check-gateway`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Variant = Literal["rayfleet", "serve-items", "two-hop"]
VARIANTS: tuple[Variant, ...] = ("rayfleet", "serve-items", "two-hop")


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayOptions:
    """Number and pace of streams, and the variants to measure."""

    model: str = ""
    """Folder with a tokenizer and a chat template; default: the demo model."""
    streams: tuple[int, ...] = field(default=(1, 8, 32), metadata={"separator": ","})
    """Numbers of concurrent requests, each measured separately; the goal applies to the last
    one."""
    step_ms: float = 20.0
    """Milliseconds per token."""
    input_len: int = 128
    """Tokens per prompt."""
    output_len: int = 250
    """Tokens per completion."""
    requests_per_stream: int = 4
    """Number of requests per stream, in sequence."""
    rounds: int = 1
    """Number of measurements; the median is reported."""
    baseline: Variant | None = field(
        default=None, metadata={"argparse": {"nargs": "?", "const": "two-hop"}}
    )
    """Baseline to alternate with: serve-items (no socket between worker and gateway) or two-hop (a
    plain Serve app with Ray's default settings; the default)."""
    variant: Variant = "rayfleet"
    """Measure only this variant."""

    def __post_init__(self) -> None:
        if min(*self.streams, self.requests_per_stream, self.rounds, self.input_len) < 1:
            raise ValueError("streams, requests per stream, rounds and lengths must be at least 1")
        if self.output_len < 2:
            raise ValueError("--output-len must be at least 2")
        if self.step_ms <= 0:
            raise ValueError("--step-ms must be greater than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A running endpoint and the processes behind it."""

    base_url: str
    endpoint: str
    parts: Mapping[str, tuple[str, ...]]
    """Command-line prefixes, keyed by part, for `CpuMeter`."""
    says_prose: bool = False
    """Whether completions come from a steady worker; see `prose_after`."""
