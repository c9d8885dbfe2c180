"""Compiles the kernels that ops launch, for a GPU that need not be there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

_PRODUCTS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")
"""Instructions that multiply matrices, the newest first."""


class Usage(NamedTuple):
    registers: int
    spilled_bytes: int


@dataclass(frozen=True)
class Binary:
    """One launch's machine code."""

    kernel: str
    shared_bytes: int
    key: str
    """Equal where two launches share a binary."""
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    tile_rows: int
    """Of a product's first factor; 0 of kernels without any."""

    @property
    def instruction(self) -> str:
        """That multiplies matrices; empty where none does."""
        found = (name for name in _PRODUCTS if name in self.ptx)
        return next(found, "")

    def usage(self) -> Usage:
        """What a thread of it takes, by the disassembler that Triton brings."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            told = subprocess.run(
                [str(tool), "-res-usage", file.name], stdout=subprocess.PIPE, text=True, check=True
            ).stdout
        registers, stack, local = (
            int(value) for value in re.findall(r"(?:REG|STACK|LOCAL):(\d+)", told)
        )
        return Usage(registers, stack + local)


class Driver:
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
        compiled.append(
            Binary(
                *(self.fn.__name__, kernel.metadata.shared, kernel.hash),
                *(kernel.asm["ptx"], kernel.asm["cubin"], kwargs.get("BLOCK_M", 0)),
            )
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(triton.runtime.driver, "_active", Driver(capability))
        yield compiled
