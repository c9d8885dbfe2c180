"""Benchmark `roofline`: time of decode steps relative to their memory-bandwidth roofline.

A decode step reads each weight once, and the keys and values of each request. The roofline is the
time to read these bytes at the bandwidth that a plain copy or sum reaches on the device. The rest
of a step's time is spent on launches, gaps, slower kernels and sampling.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from cluster.bench.report import Check, Result, at_least, checks_json, note
from cluster.bench.stats import percentile
from deploy.benchmarks.engine import BenchEngine, DecodeTurn, decode_tokens
from deploy.benchmarks.idle import idle_checks
from deploy.benchmarks.kernels.options import RooflineOptions
from deploy.benchmarks.kernels.run import Peaks, measure_peaks
from deploy.benchmarks.kernels.shapes import SHAPES, write_shape
from worker.models.config.model_config import ModelConfig, load_model_config
from worker.models.config.quantization import Fp4Config, GroupedIntConfig, ScaledConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.rank.dtype import resolve_dtype
from worker.rank.rank import select_device

_GOALS = {"qwen3-8b": {32: 65.0, 128: 65.0}, "qwen3-0.6b": {1: 40.0}}
"""Minimum percentage of the roofline on a GPU, by model and number of requests."""
_PEAK_SECONDS = 0.2


def run_roofline(options: RooflineOptions) -> Result:
    """Measures the device's peaks, then each model at each number of requests."""
    device = select_device(options.engine, 0)
    dtype = resolve_dtype(options.engine, None, TensorParallelGroup.alone(device))
    peaks = measure_peaks(device, dtype, _PEAK_SECONDS)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the engine sizes its KV cache by free memory
    note(f"measured bandwidth: {peaks.bandwidth / 1e9:.0f} GB/s")
    models: dict[str, Any] = {}
    checks: list[Check] = []
    for name in options.models:
        models[name] = _measure(name, options, peaks, dtype)
        if device.type == "cuda":
            checks += _checks(name, models[name])
    if device.type == "cuda":
        cells = [cell for model in models.values() for cell in model.values()]
        checks += idle_checks(
            [(cell["idle_us"], cell["idle_us"] / cell["wall_us"]) for cell in cells]
        )
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "input_len": options.input_len,
        "steps": options.steps,
        "peaks": asdict(peaks),
        "models": models,
        "checks": checks_json(checks),
    }


def step_bytes(
    model: ModelConfig, *, running: int, context: float, value_bytes: int, ranks: int = 1
) -> float:
    """Minimum number of bytes that one rank reads in a decode step of a dense model; excludes the
    scales of quantized weights.

    Args:
        model: dimensions of the model.
        running: number of running requests.
        context: number of tokens that each request attends to.
        value_bytes: bytes per unquantized weight, key or value.
        ranks: number of tensor-parallel ranks.
    """
    heads = model.num_heads + 2 * model.num_kv_heads
    attention = model.hidden_size * model.head_dim * (heads + model.num_heads)
    mlp = 3 * model.hidden_size * model.intermediate_size
    head = model.vocab_size * model.hidden_size
    cache = 2 * model.num_layers * model.num_kv_heads * model.head_dim * running * context
    weights = model.num_layers * (attention + mlp) * _weight_bytes(model, value_bytes)
    return (weights + (head + cache) * value_bytes) / ranks


def _weight_bytes(model: ModelConfig, value_bytes: int) -> float:
    """Bytes per weight in linear layers other than the LM head."""
    match None if model.quantization is None else model.quantization.weights:
        case ScaledConfig():
            return 1.0
        case GroupedIntConfig(bits=bits):
            return bits / 8
        case Fp4Config():
            return 0.5
    return float(value_bytes)


def _measure(name: str, options: RooflineOptions, peaks: Peaks, dtype: torch.dtype) -> Result:
    with tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True) as directory:
        folder = write_shape(name, directory) if name in SHAPES else name
        config = options.engine.with_options(
            model=folder,
            load_format="dummy",
            overlap_depth=1,
            max_num_seqs=max(options.running),
        )
        tokens = decode_tokens(options.steps, options.input_len)
        with BenchEngine(config, request_tokens=tokens) as engine:
            return {
                str(running): _cell(name, engine, running, options, peaks, dtype)
                for running in options.running
            }


def _cell(
    name: str,
    engine: BenchEngine,
    running: int,
    options: RooflineOptions,
    peaks: Peaks,
    dtype: torch.dtype,
) -> Result:
    decode = partial(engine.decode, running, steps=options.steps, input_len=options.input_len)
    decode(0)  # warms up
    turns = [decode(number) for number in range(1, options.turns + 1)]
    num_bytes = step_bytes(
        load_model_config(engine.config.checkpoint, weights=False),
        running=running,
        context=options.input_len + options.steps / 2,
        value_bytes=dtype.itemsize,
        ranks=engine.config.tensor_parallel_size,
    )
    figures = summarise(turns, running, num_bytes / peaks.bandwidth * 1e6)
    note("{}, {} running: {wall_us:.0f} us per step, {percent_of_roofline:.1f} % of the roofline"
         .format(name, running, **figures))  # fmt: skip
    return figures


def summarise(turns: list[DecodeTurn], running: int, roofline_us: float) -> Result:
    """Metrics for one number of running requests: medians over the measurements.

    Args:
        turns: the measurements.
        running: number of running requests.
        roofline_us: roofline of a step in microseconds.
    """
    wall = percentile([turn.wall_us for turn in turns], 50.0)
    compute = percentile([turn.compute_us for turn in turns], 50.0)
    return {
        "tokens_per_second": running * 1e6 / wall,
        "wall_us": wall,
        "compute_us": compute,
        "idle_us": percentile([turn.idle_us for turn in turns], 50.0),
        "roofline_us": roofline_us,
        "percent_of_roofline": 100.0 * roofline_us / wall,
        "percent_of_roofline_computing": 100.0 * roofline_us / compute,
    }


def _checks(name: str, cells: Result) -> list[Check]:
    return [
        at_least(f"{name}_{running}", cells[str(running)]["percent_of_roofline"], "%", goal)
        for running, goal in _GOALS.get(name, {}).items()
        if str(running) in cells
    ]
