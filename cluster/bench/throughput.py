"""`rayfleet bench throughput`: benchmarks the engine offline with `LLM`, without HTTP or Ray."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.bench.datasets import DatasetOptions, Sample, make_samples
from cluster.bench.prompts import PromptSpace
from cluster.bench.report import Result, checks_json, exactly, note
from cluster.bench.turns import take_turns
from worker.config import EngineConfig
from worker.protocol.options import option_values

if TYPE_CHECKING:
    from worker.llm import LLM, RequestOutput

_WARMUP_SEED = 1_000_003
_MIN_PAIRS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputOptions:
    """Options of an offline benchmark. Up to the engine's `max_num_seqs` requests run at a time."""

    engine: EngineConfig = field(metadata={"flag": None})
    """Configuration of the engine."""
    tokenizer: str | None = None
    """Folder with tokenizer.json; by default the model's."""
    dataset: DatasetOptions = field(default_factory=DatasetOptions, metadata={"flag": None})
    """Type of prompts, and lengths of prompts and completions."""
    num_prompts: int = 100
    """Number of requests."""
    num_warmups: int = 8
    """Number of warm-up requests, which are not measured."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    disable_detokenize: bool = False
    """Return token IDs without text."""
    seed: int = 0
    """Seed of prompts and sampling."""
    rounds: int | None = None
    """Number of measured rounds, each with new prompts; the median is reported. 1 if unset, or 5
    with --batch-invariant-cost."""
    batch_invariant_cost: bool = False
    """Measure batch-invariant and normal mode alternately, and report the ratio."""

    def __post_init__(self) -> None:
        if self.num_prompts < 1 or self.num_warmups < 0 or self.num_rounds < 1:
            raise ValueError(
                "--num-prompts and --rounds must be at least 1, and --num-warmups at least 0, got "
                f"{self.num_prompts}, {self.num_rounds} and {self.num_warmups}"
            )
        if self.batch_invariant_cost and self.num_rounds < _MIN_PAIRS:
            raise ValueError(
                f"--batch-invariant-cost needs --rounds of at least {_MIN_PAIRS}, got "
                f"{self.num_rounds}"
            )

    @property
    def num_rounds(self) -> int:
        """Number of measured rounds."""
        minimum = _MIN_PAIRS if self.batch_invariant_cost else 1
        return minimum if self.rounds is None else self.rounds


def run_throughput(options: ThroughputOptions) -> Result:
    """Measures the engine's throughput, or the cost of the batch-invariant mode."""
    if options.batch_invariant_cost:
        return _batch_invariant_cost(options)
    with _open(options) as llm:
        runs = [_measure(llm, options, number) for number in range(options.num_rounds)]
    return _summary(options, runs)


def _batch_invariant_cost(options: ThroughputOptions) -> Result:
    variants = {
        name: partial(
            _measure_alone,
            replace(options, engine=replace(options.engine, batch_invariant=invariant)),
            name,
        )
        for name, invariant in (("normal", False), ("batch_invariant", True))
    }
    turns = take_turns(variants, options.num_rounds)
    # The cost has no goal; the check is that both modes processed the same number of tokens.
    lengths = {run["total_num_tokens"] for name in variants for run in turns[name]}
    return {
        **_setting(options),
        "tokens_per_second": {name: turns.median(name, _speed) for name in variants},
        "tokens_per_second_rounds": {name: turns.values(name, _speed) for name in variants},
        "batch_invariant_over_normal": turns.comparison("batch_invariant", "normal", _speed),
        "checks": checks_json([exactly("different_token_counts", len(lengths) - 1, "counts", 0)]),
    }


def _speed(run: Result) -> float:
    return float(run["tokens_per_second"])


def _measure_alone(options: ThroughputOptions, name: str, number: int) -> Result:
    # One engine at a time, since an idle engine of the other mode would use memory.
    with _open(options) as llm:
        run = _measure(llm, options, number)
    note(f"{name}, round {number}: {run['tokens_per_second']:.1f} tokens/s")
    return run


def _open(options: ThroughputOptions) -> LLM:
    # Imported here, since importing torch takes seconds.
    from worker.llm import LLM

    return LLM(**{**option_values(options.engine), "tokenizer": options.tokenizer})


def _measure(llm: LLM, options: ThroughputOptions, number: int) -> Result:
    space = PromptSpace.load(_tokenizer_folder(options))
    make = partial(make_samples, options.dataset, vocabulary=space.vocabulary)
    if options.num_warmups:
        warmups = make(count=options.num_warmups, seed=options.seed + number + _WARMUP_SEED)
        _generate(llm, options, warmups)
    samples = make(count=options.num_prompts, seed=options.seed + number)
    start = time.perf_counter()
    outputs = _generate(llm, options, samples)
    elapsed = time.perf_counter() - start
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_input = sum(len(sample.prompt_token_ids) for sample in samples)
    num_requested = sum(sample.output_len for sample in samples)
    return {
        "max_num_seqs": llm.config.scheduling.max_num_seqs,
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": num_input + num_output,
        "total_output_tokens": num_output,
        "total_cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (num_input + num_output) / elapsed,
        "output_tokens_per_second": num_output / elapsed,
        "missing_tokens": num_requested - num_output,
    }


def _generate(llm: LLM, options: ThroughputOptions, samples: list[Sample]) -> list[RequestOutput]:
    from worker.llm import Prompt, SamplingParams

    params = [
        SamplingParams(
            temperature=options.temperature,
            max_tokens=sample.output_len,
            ignore_eos=True,
            seed=options.seed + index,
        )
        for index, sample in enumerate(samples)
    ]
    prompts: list[Prompt] = [{"prompt_token_ids": s.prompt_token_ids} for s in samples]
    return llm.generate(prompts, params, detokenize=not options.disable_detokenize)


def _tokenizer_folder(options: ThroughputOptions) -> str | None:
    folder = options.tokenizer or options.engine.model
    return folder if (Path(folder) / "tokenizer.json").is_file() else None


def _summary(options: ThroughputOptions, runs: list[Result]) -> Result:
    median = sorted(runs, key=_speed)[(len(runs) - 1) // 2]
    missing = sum(run["missing_tokens"] for run in runs)
    result = {
        **_setting(options),
        "batch_invariant": options.engine.batch_invariant,
        **median,
    }
    if len(runs) > 1:
        result["tokens_per_second_rounds"] = list(map(_speed, runs))
    return {**result, "checks": checks_json([exactly("missing_tokens", missing, "tokens", 0)])}


def _setting(options: ThroughputOptions) -> Result:
    return {
        "model": options.engine.model,
        "max_num_seqs": options.engine.scheduling.max_num_seqs,
        "tensor_parallel_size": options.engine.tensor_parallel_size,
        "dataset_name": options.dataset.dataset_name,
    }
