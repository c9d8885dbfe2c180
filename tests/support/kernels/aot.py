"""Compiles the kernels that ops launch, for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Binary:
    """One launch's machine code."""

    kernel: str
    shared_bytes: int
    key: str
    """Equal where two launches share a binary."""


class _Driver:
    """Stands in for Triton's CUDA driver as far as compiling goes."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        # Kernels keep what they compiled by device: one device per capability.
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Binary]]:
    """Inside, a launch compiles to a binary and runs nothing; yields what was launched so far.

    Tensors on CPU stand for those on the GPU; everything else about a launch is as it will be.
    """
    compiled: list[Binary] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert "cubin" in kernel.asm
        compiled.append(Binary(self.fn.__name__, kernel.metadata.shared, kernel.hash))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(triton.runtime.driver, "_active", _Driver(capability))
        yield compiled
