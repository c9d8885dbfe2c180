"""One op on one shape, for benchmark `kernels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One op on one shape."""

    op: str
    shape: str
    """Text that describes the shape."""
    run: Callable[[], object]
    """Runs the op once."""
    num_bytes: float
    """Bytes to read each input once and write each output once."""
    num_flops: float = 0.0
    """Floating-point operations of matrix products; 0 for ops without any."""
