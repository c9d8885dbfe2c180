"""Compiles the kernels that ops launch, without a GPU."""

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
"""Matrix-multiply instructions, newest first."""


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
    """Rows of a product's first factor; 0 for kernels without products."""

    @property
    def instruction(self) -> str:
        """Matrix-multiply instruction; empty if none."""
        found = (name for name in _PRODUCTS if name in self.ptx)
        return next(found, "")

    def usage(self) -> Usage:
        """Resources per thread, from the disassembler shipped with Triton."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            output = subprocess.run(
                [str(tool), "-res-usage", file.name], stdout=subprocess.PIPE, text=True, check=True
            ).stdout
        registers, stack, local = (
            int(value) for value in re.findall(r"(?:REG|STACK|LOCAL):(\d+)", output)
        )
        return Usage(registers, stack + local)


class Driver:
    """Fake of Triton's CUDA driver for compiling."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        # Kernels cache binaries by device: one device per capability.
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Binary]]:
    """Context in which a launch compiles a binary without running it; yields the launches so far.

    Tensors on CPU replace those on the GPU; all else about a launch is unchanged.
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
