"""Options of the benchmark `lora`; does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraOptions:
    """Options of benchmark `lora`, which runs on CPU and sets `max_loras` and `max_num_seqs`."""

    engine: EngineConfig = field(
        default_factory=lambda: EngineConfig(model=""), metadata={"flag": None}
    )
    """Engine options, with and without LoRA."""
    pairs: int = 30
    """Number of measurements per variant, in alternation."""
    num_adapters: int = 8
    """Number of adapters. Each one adapts all projections of attention and MLP."""
    running: int = 32
    """Number of requests that decode concurrently."""
    steps: int = 4
    """Number of decode steps per measurement."""
    input_len: int = 256
    """Tokens per prompt when prompts are measured."""

    def __post_init__(self) -> None:
        for name in ("pairs", "num_adapters", "running", "steps", "input_len"):
            if getattr(self, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be at least 1, got {getattr(self, name)}")
