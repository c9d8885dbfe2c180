"""Options of the kernel benchmark; apart from it, since it loads torch."""

from __future__ import annotations

from dataclasses import dataclass

from worker.config import Device, DType


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelOptions:
    """What is measured. The default dimensions are Qwen3-8B's on CUDA, Qwen3-0.6B's on CPU."""

    device: Device = "auto"
    """auto is cuda where a CUDA device is visible, else cpu."""
    dtype: DType = "auto"
    """auto is bfloat16 on CUDA and float32 on CPU."""
    rows: str = ""
    """Requests at once, separated by commas; default 1,32,128 on CUDA and 1,8 on CPU."""
    context: int = 0
    """Tokens in the cache per request; default 2048 on CUDA, 256 on CPU."""
    ops: str = ""
    """Names of ops, separated by commas; default all."""
    seconds: float = 0.15
    """Time to spend on each op and shape."""

    def __post_init__(self) -> None:
        if self.context < 0:
            raise ValueError("--context must not be negative")
        if not self.seconds > 0.0:
            raise ValueError("--seconds must be positive")
        if any(not text.isdigit() or int(text) < 1 for text in self.rows.split(",") if text):
            raise ValueError(f"--rows needs numbers from 1 on, as in 1,32, got {self.rows!r}")
