"""Benchmark `lora`: CPU time of steps with LoRA, relative to steps without LoRA.

Two ranks in this process, with and without LoRA, compute the same rows in turn on one thread. CPU
time is hardly affected by other load, and drift in the processor's speed affects both ranks
equally.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file

from cluster.bench.report import Check, Result, at_most, checks_json, note
from cluster.bench.stats import bootstrap_interval, percentile
from cluster.bench.turns import take_turns
from deploy.benchmarks.lora_options import LoraOptions
from worker.config import EngineConfig, LoraConfig
from worker.models.config.model_config import load_model_config
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.loader import build_without_weights
from worker.plan.plan import AdapterLoad, AdapterRead, Admit, PageWrite, Plan, PlannedRow
from worker.rank.runner import ModelRunner

_CONTEXT: Final = 64
"""Tokens per request before its first decode step."""
_PAGE_SIZE: Final = 16
"""Tokens per page by default."""
_GOALS: Final[Mapping[str, float]] = {"none": 1.02, "mixed": 1.25, "prompt": 1.15}
"""Maximum ratios: decode steps without adapters, those with all adapters, and prompts with one."""


def run_lora(options: LoraOptions) -> Result:
    """Measures decode steps and prompts."""
    count, running = options.num_adapters, options.running
    kinds: Mapping[str, Sequence[int]] = {
        "none": [0] * running,
        "mixed": [1 + row % count for row in range(running)],
        "prompt": [1],
    }
    result: Result = {"model": options.engine.model, "pairs": options.pairs}
    checks: list[Check] = []
    with tempfile.TemporaryDirectory() as folder:
        assert options.engine.lora is not None, "the command enables LoRA"
        lora = replace(options.engine.lora, max_loras=count)
        without, rank = _Rank(options, None), _Rank(options, lora)
        rank.load(_write_adapters(options.engine, Path(folder), count, lora.max_lora_rank))
        for kind, adapters in kinds.items():
            measure = _Rank.prompt if kind == "prompt" else _Rank.decode
            variants = {
                "off": partial(measure, without, [0] * len(adapters)),
                "on": partial(measure, rank, adapters),
            }
            turns = take_turns(variants, options.pairs, warmups=2)
            found = turns.ratios("on", "off", float)
            ratio = percentile(found, 50.0)
            low, high = bootstrap_interval(
                lambda rounds, found=found: percentile([found[i] for i in rounds], 50.0),  # type: ignore[misc]  # a default binds it
                len(found),
            )
            off = turns.median("off", float)
            result[kind] = {"ratio": ratio, "low": low, "high": high, "without_ms": off}
            note(f"{kind}: {ratio:.3f} [{low:.3f}, {high:.3f}] times the {off:.2f} ms without LoRA")
            checks.append(at_most(f"{kind}_ratio", ratio, "", _GOALS[kind]))
    return {**result, "checks": checks_json(checks)}


class _Rank:
    """A rank on one CPU thread.

    Args:
        options: options of the benchmark.
        lora: LoRA options; None if LoRA is disabled.
    """

    def __init__(self, options: LoraOptions, lora: LoraConfig | None) -> None:
        self._options = options
        length = max(_CONTEXT + options.steps, options.input_len) + 1
        page_size = options.engine.cache.page_size or _PAGE_SIZE
        self._pages = -(-length // page_size)
        config = options.engine.with_options(
            device="cpu",
            cpu_threads=1,
            page_size=page_size,
            max_num_seqs=options.running,
            max_num_batched_tokens=options.running * length,
            kv_cache_tokens=(1 + options.running * self._pages) * page_size,
        )
        torch.set_num_threads(1)
        self._runner = ModelRunner(
            replace(config, lora=lora), TensorParallelGroup.alone(torch.device("cpu"))
        )
        self._runner.allocate(self._runner.hello().num_pages)
        self._seq = 0

    def load(self, folders: Sequence[Path]) -> None:
        """Loads adapters into slots 1 and up."""
        keys = range(1, 1 + len(folders))
        reads = [AdapterRead(key, str(folder)) for key, folder in zip(keys, folders, strict=True)]
        loads = [AdapterLoad(key, key) for key in keys]
        self._runner.execute(Plan(0, [], [], [], adapter_reads=reads, adapter_loads=loads))

    def decode(self, adapters: Sequence[int], _: int) -> float:
        """CPU time in milliseconds per decode step with one row per entry of `adapters`."""
        rows = range(len(adapters))
        self._start(adapters, _CONTEXT)
        started = time.process_time()
        for step in range(self._options.steps):
            self._run([], [], [PlannedRow(row, _CONTEXT + step, 1, 1) for row in rows])
        return (time.process_time() - started) / self._options.steps * 1e3

    def prompt(self, adapters: Sequence[int], _: int) -> float:
        """CPU time in milliseconds of a step with one prompt per entry of `adapters`."""
        started = time.process_time()
        self._start(adapters, self._options.input_len)
        return (time.process_time() - started) * 1e3

    def _start(self, adapters: Sequence[int], length: int) -> None:
        """Admits a request per entry of `adapters`, and computes the prompts."""
        tokens = np.random.default_rng(0).integers(0, 100, length).astype("<i4").tobytes()
        admits, writes = list[Admit](), list[PageWrite]()
        for row, adapter in enumerate(adapters):
            admits.append(Admit(row, tokens, 0.0, 0, 1.0, 0.0, 0, adapter=adapter))
            first = 1 + row * self._pages
            writes.append(PageWrite(row, 0, list(range(first, first + self._pages)), 0))
        rows = [PlannedRow(row, 0, length, 1) for row in range(len(adapters))]
        self._run(admits, writes, rows)

    def _run(self, admits: list[Admit], writes: list[PageWrite], rows: list[PlannedRow]) -> None:
        self._seq += 1
        self._runner.execute(Plan(self._seq, admits, writes, list(rows)))


def _write_adapters(config: EngineConfig, folder: Path, count: int, rank: int) -> list[Path]:
    """Saves adapters with random weights for all projections that support them."""
    model = build_without_weights(load_model_config(config.checkpoint, weights=False), 1)
    shapes = {
        slot.name.removesuffix(".weight"): slot.full_shape
        for slot in model.weight_slots()
        if slot.module is not None and getattr(slot.module.layer, "supports_lora", False)
    }
    settings = {"r": rank, "lora_alpha": rank, "target_modules": sorted(shapes)}
    settings |= {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
    folders = [folder / str(number) for number in range(count)]
    for number, own in enumerate(folders):
        own.mkdir()
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for name, (outputs, inputs) in shapes.items():
            for end, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                weight = 0.01 * torch.randn(*shape, generator=generator)
                tensors[f"base_model.model.{name}.lora_{end}.weight"] = weight
        save_file(tensors, own / "adapter_model.safetensors")
        (own / "adapter_config.json").write_text(json.dumps(settings))
    return folders
