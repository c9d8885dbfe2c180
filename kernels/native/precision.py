"""Speedup of bfloat16 over float32 weights in matmuls on this CPU.

It is measured once per CPU model and cached next to the compiled library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch

from kernels.linear import onednn
from kernels.native.build import MAX_CPU_ISA, build_library, cache_folder, processor
from kernels.native.packing import multiply, pack_weight

Multiplier = Literal["native", "torch"]
"""Matmul implementations: the compiled library, or torch with oneDNN."""

_INSTRUCTIONS = frozenset(("amx_bf16", "avx512_bf16", "bf16"))
"""Instruction sets with bfloat16 dot products, as named in /proc/cpuinfo: AMX, AVX-512, ARM."""
_LIMITS_WITHOUT = frozenset(("AVX512_CORE", "AVX512_CORE_VNNI", "AVX2", "AVX2_VNNI", "SSE41"))
"""Values of `MAX_CPU_ISA` and `ONEDNN_MAX_CPU_ISA` that exclude bfloat16 dot products."""
_SHAPE = (1024, 2048)
"""Shape of the weight, [N, K]: 8 MiB in float32, more than fits in a core's caches."""
_ROWS = (1, 32)
"""Numbers of rows: a single request, and a batch; bfloat16 must be faster for both."""
_ROUNDS = 5


def has_bf16_products() -> bool:
    """Whether the CPU has bfloat16 instructions; other CPUs convert to float32 first."""
    limits = {os.environ.get(MAX_CPU_ISA, ""), os.environ.get("ONEDNN_MAX_CPU_ISA", "")}
    if limits & _LIMITS_WITHOUT:
        return False
    return not _INSTRUCTIONS.isdisjoint(processor().split())


def bf16_speedup(multiplier: Multiplier) -> float:
    """Ratio of matmul times with weights in float32 and in bfloat16; the minimum over all numbers
    of rows.

    Takes about 0.1 s the first time on a CPU model; cached afterwards.

    Raises:
        NativeUnavailable: `multiplier` is "native", and the library cannot be compiled or loaded on
            this machine.
    """
    path = cache_folder() / f"bf16-{multiplier}-{_key(multiplier)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return float(json.loads(path.read_text()))
    speedup = round(_measure(multiplier), 2)
    _keep(path, speedup)
    return speedup


def _key(multiplier: Multiplier) -> str:
    """Hash of everything that the measurement depends on."""
    used = build_library().name if multiplier == "native" else torch.__version__
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return hashlib.sha256(f"{used}\0{limit}\0{processor()}".encode()).hexdigest()[:20]


def _keep(path: Path, speedup: float) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # without the file, the next startup measures again
        unfinished.write_text(json.dumps(speedup))
        unfinished.rename(path)


def _measure(multiplier: Multiplier) -> float:
    """Minimum speedup over all numbers of rows, from the CPU time of this thread, which other
    processes hardly affect."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return min(_speedups(multiplier))
    finally:
        torch.set_num_threads(num_threads)


def _speedups(multiplier: Multiplier) -> Iterator[float]:
    weight = torch.randn(_SHAPE)
    make = _native_product if multiplier == "native" else _torch_product
    plain, half = make(weight), make(weight.bfloat16())
    for rows in _ROWS:
        x = torch.randn(rows, _SHAPE[1])
        best = [float("inf"), float("inf")]
        for _ in range(_ROUNDS):
            for which, product in enumerate((plain, half)):
                began = time.thread_time()
                product(x)
                best[which] = min(best[which], time.thread_time() - began)
        yield best[0] / best[1]


def _native_product(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    packed, outputs = pack_weight(weight), len(weight)
    return lambda x: multiply(x, packed, outputs)


def _torch_product(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    if not onednn.is_available(weight.dtype):
        return lambda x: torch.nn.functional.linear(x.to(weight.dtype), weight)
    packed = onednn.OnednnWeight(weight)
    return lambda x: packed.multiply(x.to(weight.dtype), None)
