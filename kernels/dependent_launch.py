"""Programmatic dependent launch (PDL) of Triton kernels, for compute capability 9.0 or higher.

A kernel launched with PDL starts once all programs of the stream's previous kernel have started and
signaled, instead of after its completion. `wait_for_previous_kernel` then blocks each program until
the previous kernel has completed and its stores are visible. CUDA graphs keep these dependencies.
Kernels and copies that are not launched with PDL (torch, cuBLAS) start after the previous kernel
has completed, as always.

Source: "Programmatic Dependent Launch and Synchronization", CUDA C++ Programming Guide.
"""

# mypy: disable-error-code="misc,no-untyped-def,untyped-decorator"
from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

DISABLE_PDL = "RAYFLEET_DISABLE_PDL"
"""Environment variable that disables PDL if it is set to anything but 0."""
_CAPABILITY = 90


def dependent_kernel(function: Callable[..., None] | None = None, **options: Any) -> Any:
    """Decorator for a Triton kernel that is launched with PDL if the device supports it.

    The kernel's first statement must be `wait_for_previous_kernel()`.

    Args:
        function: the kernel.
        options: keyword arguments of `triton.jit`.
    """
    if function is None:
        return functools.partial(dependent_kernel, **options)
    if triton.knobs.runtime.interpret:
        return triton.jit(function, **options)
    return _DependentKernel(function, **options)


@triton.jit
def wait_for_previous_kernel():
    """Waits until the previous kernel of the stream has completed; a no-op without PDL.

    HAZARD(order): no program may access global memory or return before this call. The next kernel
    waits only for this one, so all earlier kernels must have completed once this one has.
    """
    if _has_pdl():
        tl.extra.cuda.gdc_wait()
        # The next kernel waits for completion, not for this signal, so its programs may already be
        # scheduled where this kernel leaves multiprocessors idle. The signal comes after the wait
        # so that only one kernel at a time occupies multiprocessors just to wait.
        tl.extra.cuda.gdc_launch_dependents()


@triton.constexpr_function
def _has_pdl() -> bool:
    """Whether a kernel is compiled for a device with PDL."""
    interpreted = triton.knobs.runtime.interpret
    return not interpreted and tl.target_info.cuda_capability_geq(_CAPABILITY // 10)


class _DependentKernel(JITFunction):
    """A kernel that Triton launches with PDL if the device supports it. Support is checked once per
    binary, so that launches do not take longer on the host."""

    def _do_compile(self, *arguments: Any, **options: Any) -> Any:
        compiled = super()._do_compile(*arguments, **options)
        if compiled is not None and _supports_pdl(compiled.metadata):
            compiled.metadata = compiled.metadata._replace(launch_pdl=True)
        return compiled


def _supports_pdl(metadata: Any) -> bool:
    """Whether a compiled kernel may be launched before the previous one has completed.

    False if it uses tensor memory, as most matmuls on Blackwell do. Triton allocates tensor memory
    before the wait, and the previous kernel could need the same memory to complete.
    """
    if os.environ.get(DISABLE_PDL, "0") != "0":
        return False
    target = metadata.target
    if target.backend != "cuda" or target.arch < _CAPABILITY:
        return False
    return not metadata.tmem_size
