"""Options of the benchmarks `kernels` and `roofline`; does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from deploy.benchmarks.kernels.shapes import SHAPES
from worker.config import Device, DType, EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelOptions:
    """Options of benchmark `kernels`. Shapes are those of Qwen3-8B on CUDA and of Qwen3-0.6B on
    CPU."""

    device: Device = "auto"
    """Device; auto is cuda if a CUDA device is visible, otherwise cpu."""
    dtype: DType = "auto"
    """Data type; auto selects bfloat16 on CUDA and float32 on CPU."""
    rows: tuple[int, ...] = field(default=(), metadata={"separator": ","})
    """Numbers of requests per step, separated by commas; default: 1,32,128 on CUDA, 1,8 on CPU."""
    context: int = 0
    """Tokens in the KV cache per request; default: 2048 on CUDA, 256 on CPU."""
    ops: tuple[str, ...] = field(default=(), metadata={"separator": ","})
    """Names of ops, separated by commas; default: all."""
    seconds: float = 0.15
    """Seconds to spend on each op and shape."""

    def __post_init__(self) -> None:
        if self.context < 0:
            raise ValueError(f"--context must not be negative, got {self.context}")
        if not self.seconds > 0.0:
            raise ValueError(f"--seconds must be greater than 0, got {self.seconds}")
        if min(self.rows, default=1) < 1:
            raise ValueError(
                "--rows must be a comma-separated list of positive integers, such as 1,32, got "
                f"{list(self.rows)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineOptions:
    """Options of benchmark `roofline`. Weights are random; the benchmark sets `overlap_depth`,
    `load_format` and `max_num_seqs`."""

    models: tuple[str, ...] = field(
        default=tuple(SHAPES), metadata={"argparse": {"action": "extend", "nargs": "+"}}
    )
    """Names of known models (see `deploy.benchmarks.kernels.shapes`), or folders with a
    config.json."""
    engine: EngineConfig = field(
        default_factory=lambda: EngineConfig(model=""), metadata={"flag": None}
    )
    """Engine options for all models; `model` is replaced."""
    running: tuple[int, ...] = field(default=(1, 32, 128), metadata={"separator": ","})
    """Numbers of requests that decode concurrently."""
    turns: int = 3
    """Number of measurements; the median is reported."""
    steps: int = 64
    """Number of measured steps per measurement."""
    input_len: int = 512
    """Tokens per prompt; each step reads their keys and values."""

    def __post_init__(self) -> None:
        if self.turns < 1 or self.steps < 1 or self.input_len < 1:
            raise ValueError(
                "--turns, --steps and --input-len must be at least 1, got "
                f"{self.turns}, {self.steps} and {self.input_len}"
            )
        if not self.models or not self.running or min(self.running) < 1:
            raise ValueError(
                "--models must not be empty, and --running must be a comma-separated list of "
                f"positive integers, such as 1,32,128, got {list(self.running)}"
            )
