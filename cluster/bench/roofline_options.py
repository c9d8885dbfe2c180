"""Options of the roofline benchmark; apart from it, since it loads torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.bench.model_shapes import SHAPES
from worker.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineOptions:
    """What decodes. Weights are random; `overlap_depth`, `load_format` and `max_num_seqs` are set
    by the benchmark."""

    models: tuple[str, ...] = tuple(SHAPES)
    """Names in SHAPES, or folders with a config.json."""
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(model=""))
    """For all of them; its `model` does not count."""
    running: tuple[int, ...] = (1, 32, 128)
    """Numbers of requests that decode at once."""
    turns: int = 3
    """Measurements; the median is reported."""
    steps: int = 64
    """Steps per turn."""
    input_len: int = 512
    """Prompt tokens, whose keys and values every step reads."""

    def __post_init__(self) -> None:
        if self.turns < 1 or self.steps < 1 or self.input_len < 1:
            raise ValueError("--turns, --steps and --input-len must be at least 1")
        if not self.models or not self.running or min(self.running) < 1:
            raise ValueError("--running needs numbers of at least 1, such as 1,32,128")
