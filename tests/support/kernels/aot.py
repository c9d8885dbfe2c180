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
_EARLY = re.compile(
    r"(ld|st)\.(?!param)|(atom|red|cp|prefetch|applypriority|discard|mbarrier|tcgen05)\."
    r"|@|\$L__BB|(bra|brx|call|ret|exit|trap|bar|barrier|fence|membar)\b"
)
"""Instructions that must not precede a wait for the previous kernel: accesses to memory other than
parameters, and all that could make the wait conditional."""
_INSTRUCTION_BYTES = 16


class Usage(NamedTuple):
    registers: int
    spilled_bytes: int


@dataclass(frozen=True)
class Binary:
    """One launch's machine code."""

    kernel: str
    shared_bytes: int
    key: str
    """Key; launches with equal keys share a binary."""
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    tile_rows: int
    """Rows of a matmul's first operand; 0 for kernels without matmuls."""
    launches_dependent: bool
    """Whether it is launched with PDL."""

    @property
    def instruction(self) -> str:
        """Matrix-multiply instruction; empty if there is none."""
        found = (name for name in _PRODUCTS if name in self.ptx)
        return next(found, "")

    def usage(self) -> Usage:
        """Resources per thread."""
        registers, stack, local = (
            int(value)
            for value in re.findall(r"(?:REG|STACK|LOCAL):(\d+)", self._dump("-res-usage"))
        )
        return Usage(registers, stack + local)

    def loop_instructions(self) -> int:
        """Instructions per thread of the shortest loop with matrix multiplications."""
        code = self._dump("-sass")
        products = [int(place, 16) for place in re.findall(r"/\*(\w{4,})\*/ .*MMA\.", code)]
        branches = re.findall(r"/\*(\w{4,})\*/ .*\bBRA 0x(\w+)", code)
        loops = [(int(target, 16), int(place, 16)) for place, target in branches]
        return min(
            (last - first) // _INSTRUCTION_BYTES + 1
            for first, last in loops
            if any(first <= place <= last for place in products)
        )

    def _dump(self, option: str) -> str:
        """Output of the disassembler shipped with Triton."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            command = [str(tool), option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def early_instructions(ptx: str) -> list[str]:
    """Instructions of a kernel launched with PDL that must come after its wait for the previous
    kernel, but come before it; all of its instructions if it does not wait."""
    code = ptx.partition(".entry")[2].partition("{")[2]
    before = code.partition("griddepcontrol.wait;")[0]
    return [line.strip() for line in before.splitlines() if _EARLY.match(line.strip())]


def check_order(binary: Binary, capability: int) -> None:
    """Asserts that a kernel is launched with PDL and waits for the previous kernel before anything
    else, or, if it uses tensor memory, that it is launched without PDL; and that devices without
    PDL have no instructions for it."""
    if capability < 90:
        assert "griddepcontrol" not in binary.ptx, binary
        assert not binary.launches_dependent, binary
        return
    assert binary.ptx.count("griddepcontrol.launch_dependents;") == 1, binary
    assert binary.launches_dependent == ("tcgen05.alloc" not in binary.ptx), binary
    if binary.launches_dependent:
        early = early_instructions(binary.ptx)
        assert early == [], f"{binary}: before its wait, {early}"


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

    Tensors on CPU replace those on the GPU; all else about a launch is unchanged. Each binary must
    pass `check_order`.
    """
    compiled: list[Binary] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert "cubin" in kernel.asm
        binary = Binary(
            *(self.fn.__name__, kernel.metadata.shared, kernel.hash),
            *(kernel.asm["ptx"], kernel.asm["cubin"], kwargs.get("BLOCK_M", 0)),
            kernel.metadata.launch_pdl,
        )
        check_order(binary, capability)
        compiled.append(binary)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(triton.runtime.driver, "_active", Driver(capability))
        yield compiled
