"""Benchmark `kernels`: bandwidth and FLOP/s of each op, relative to peaks that are measured with a
plain copy, a plain sum and a large matmul.

On CUDA, each op is captured in a CUDA graph, as in serving, and replayed with a cold L2 cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from cluster.bench.report import Result, checks_json, exactly, note
from cluster.bench.stats import percentile
from deploy.benchmarks.kernels.case import Case, Shape, unsupported_ops
from deploy.benchmarks.kernels.cases import OTHER_OPS, make_cases
from deploy.benchmarks.kernels.options import KernelOptions
from kernels import registry

_COLD_BYTES = 256 << 20
"""Bytes written between measurements on CUDA; larger than the L2 cache."""
_LEAST_RUNS, _MOST_RUNS = 3, 50
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run_kernels(options: KernelOptions) -> Result:
    """Measures the device's peaks, then every op at every number of rows.

    Raises:
        ValueError: an op is unknown, or `device` is cuda and there is no CUDA device.
    """
    device = _device(options)
    is_cuda = device.type == "cuda"
    shape = Shape.large() if is_cuda else Shape.small()
    dtype = _DTYPES.get(options.dtype, torch.bfloat16 if is_cuda else torch.float32)
    unknown = sorted(set(options.ops) - {*registry, *OTHER_OPS})
    if unknown:
        known = ", ".join(sorted({*registry, *OTHER_OPS}))
        raise ValueError(f"--ops: unknown ops {', '.join(unknown)}: choose from {known}")
    skipped = unsupported_ops(torch.cuda.get_device_capability(device) if is_cuda else None)
    for name, reason in skipped.items():
        note(f"skipped {name}: {reason}")
    names = [op for op in options.ops or (*registry, *OTHER_OPS) if op not in skipped]
    peaks = measure_peaks(device, dtype, options.seconds)
    note(f"copy {peaks.copy_gb_s:.0f} GB/s, read {peaks.read_gb_s:.0f} GB/s, "
         f"matmul {peaks.matmul_tflop_s:.2f} TFLOP/s")  # fmt: skip
    measured: list[Result] = []
    failures: list[str] = []
    for num_rows in options.rows or ([1, 32, 128] if is_cuda else [1, 8]):
        context = options.context or (2048 if is_cuda else 256)
        for make in make_cases(shape, num_rows, context, device, dtype, names):
            case = make()
            try:
                us = _time_us(case.run, device, options.seconds)
            except RuntimeError as error:
                failures.append(f"{case.op} {case.shape}: {error}")
                note(failures[-1])
                continue
            measured.append(_figures(case, us, peaks))
            note("{op:22} {shape:34} {us:10.1f} us {gb_s:8.1f} GB/s {tflop_s:8.2f} TFLOP/s "
                 "{percent_of_peak:5.1f} % of the {limit} peak".format(**measured[-1]))  # fmt: skip
    missing = set(names) - {row["op"] for row in measured}
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "backend": "triton" if registry.uses_triton(device) else "torch",
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "peaks": asdict(peaks),
        "rows": measured,
        "skipped": [f"{name}: {reason}" for name, reason in skipped.items()],
        "failures": failures,
        "checks": checks_json([
            exactly("failures", len(failures), "ops", 0),
            exactly("not_measured", len(missing), "ops", 0),
        ]),
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """Peak rates of the device, as reached by simple operations."""

    copy_gb_s: float
    """Bandwidth of a copy in GB/s, reads and writes together."""
    read_gb_s: float
    """Bandwidth in GB/s of a sum, which only reads."""
    matmul_tflop_s: float
    """Rate of a large matmul in TFLOP/s."""

    @property
    def bandwidth(self) -> float:
        """Peak bandwidth in bytes per second: the higher of copy and sum."""
        return max(self.copy_gb_s, self.read_gb_s) * 1e9


def measure_peaks(device: torch.device, dtype: torch.dtype, seconds: float) -> Peaks:
    """Measures peak rates with a copy and a sum that exceed the caches, and with a large matmul.

    Args:
        device: device to measure.
        dtype: data type of the matmul.
        seconds: seconds per measurement.
    """
    is_cuda = device.type == "cuda"
    size = (2 << 30) if is_cuda else (128 << 20)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = _time_us(lambda: target.copy_(source), device, seconds)
    read = _time_us(lambda: source.sum(), device, seconds)
    side = 8192 if is_cuda else 1024
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    product = _time_us(lambda: a @ b, device, seconds)
    return Peaks(
        copy_gb_s=2 * size / copy / 1e3,
        read_gb_s=size / read / 1e3,
        matmul_tflop_s=2 * side**3 / product / 1e6,
    )


def _figures(case: Case, us: float, peaks: Peaks) -> Result:
    """Metrics of one op. The op is bound by memory or compute, whichever takes longer at its peak
    rate."""
    memory_us = case.num_bytes / peaks.bandwidth * 1e6
    compute_us = case.num_flops / (peaks.matmul_tflop_s * 1e12) * 1e6
    return {
        "op": case.op,
        "shape": case.shape,
        "us": us,
        "gb_s": case.num_bytes / us / 1e3,
        "tflop_s": case.num_flops / us / 1e6,
        "limit": "compute" if compute_us > memory_us else "memory",
        "percent_of_peak": 100.0 * max(memory_us, compute_us) / us,
    }


def _device(options: KernelOptions) -> torch.device:
    available = torch.cuda.is_available()
    if options.device == "cuda" and not available:
        raise ValueError("--device cuda: no CUDA device is visible; use --device cpu")
    return torch.device("cuda" if available and options.device != "cpu" else "cpu")


def _time_us(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median time of one call, in microseconds."""
    with torch.inference_mode():
        if device.type == "cuda":
            return _time_on_cuda(run, seconds)
        run()
        times: list[float] = []
        stop = time.perf_counter() + seconds
        while len(times) < _LEAST_RUNS or (len(times) < _MOST_RUNS and time.perf_counter() < stop):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6)
    return percentile(times, 50.0)


def _time_on_cuda(run: Callable[[], object], seconds: float) -> float:
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up: compiles kernels and fills the allocator
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        run()
    cold = torch.empty(_COLD_BYTES, dtype=torch.uint8, device="cuda")
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < _LEAST_RUNS or (len(times) < _MOST_RUNS and time.perf_counter() < stop):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cold.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return percentile(times, 50.0)
