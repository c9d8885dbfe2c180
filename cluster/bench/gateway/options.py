"""What `rayfleet bench gateway` measures, and what a variant of it offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Variant = Literal["rayfleet", "serve-items", "two-hop"]
VARIANTS: tuple[Variant, ...] = ("rayfleet", "serve-items", "two-hop")


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayOptions:
    """How many streams at what pace, and which variants."""

    model: str
    """Checkpoint folder; only its tokenizer and chat template are used."""
    streams: tuple[int, ...] = (1, 8, 32)
    """Measured one after the other; the goal is for the last."""
    step_ms: float = 20.0
    input_len: int = 128
    output_len: int = 250
    requests_per_stream: int = 4
    rounds: int = 1
    baseline: Variant | None = None
    """Alternate with this variant; each measurement then runs in a process of its own."""
    variant: Variant = "rayfleet"
    """What a measurement without baseline measures."""

    def __post_init__(self) -> None:
        if min(*self.streams, self.requests_per_stream, self.rounds, self.input_len) < 1:
            raise ValueError("streams, requests per stream, rounds and lengths must be at least 1")
        if self.output_len < 2:
            raise ValueError("--output-len must be at least 2")
        if self.step_ms <= 0:
            raise ValueError("--step-ms must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A running endpoint and the processes behind it."""

    base_url: str
    endpoint: str
    parts: Mapping[str, tuple[str, ...]]
    """Beginnings of command lines by part, for `CpuMeter`."""
    text: str | None = None
    """How every completion begins, where that is known."""
