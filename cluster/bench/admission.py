"""`rayfleet bench admission`: fifo against pack, in turn, on long prompts between short ones.

All requests are there at once, and all may run: every fourth prompt is 512 times as long as the
others, and no two share a prefix. Two settings, each on one engine that is told its rules anew
before each turn:

    a   prompts are not chunked, and a step takes 256 prompt tokens: a long one goes alone; pack
        begins all requests before it goes on with any
    b   prompts are chunked into steps of 256 tokens; fifo without a share for long ones, pack with
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cluster.bench.alternate import alternate
from cluster.bench.decode import DecodeEngine
from cluster.bench.report import Check, Result, at_least, at_most, checks_json, note
from cluster.bench.stats import percentile, ratios, spread_of_ratios
from worker.config import EngineConfig
from worker.wire.admission import AdmissionChange
from worker.wire.messages import Submit
from worker.wire.sampling import SamplingParams

LEAST_PAIRS = 5
_PATTERN = (512, 1, 1, 1)
"""Lengths of prompts, in base prompts."""
_FIRST_STEPS = 64
"""Under pack: most steps in a row without decodes; more than all prompts take."""
_GATEWAY = "bench"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionBenchOptions:
    """What runs; what is compared the benchmark sets itself."""

    engine: EngineConfig
    pairs: int = LEAST_PAIRS
    num_prompts: int = 128
    base_len: int = 1
    """Tokens of a short prompt."""
    output_len: int = 32
    budget: int = 256
    """Prompt tokens of a step."""
    force_fifo_every: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = (self.pairs, self.base_len, self.output_len, self.budget)
        if min(sizes) < 1 or self.num_prompts < len(_PATTERN):
            raise ValueError("sizes must be at least 1, --num-prompts at least 4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One run of the workload, in seconds."""

    ttft: Sequence[float]
    """By request."""
    tpot: Sequence[float]
    elapsed: float
    num_tokens: int
    """Prompts and output."""

    @property
    def short_ttft(self) -> list[float]:
        """Of short prompts."""
        return [t for index, t in enumerate(self.ttft) if _PATTERN[index % len(_PATTERN)] == 1]


def run_admission(options: AdmissionBenchOptions) -> Result:
    """Measures both settings."""
    longest = max(_PATTERN) * options.base_len
    whole = replace(
        _engine_config(options),
        enable_chunked_prefill=False,
        prefill_max_tokens=options.budget,
        max_num_batched_tokens=max(2 * longest, options.budget) + options.num_prompts,
    )
    chunked = replace(_engine_config(options), max_num_batched_tokens=options.budget)
    force = options.force_fifo_every
    a = _compare(
        options,
        whole,
        fifo=AdmissionChange(prefill_admission_policy="fifo", prefill_first_steps=0),
        pack=AdmissionChange(
            prefill_admission_policy="pack",
            prefill_force_fifo_every=force,
            prefill_first_steps=_FIRST_STEPS,
        ),
    )
    b = _compare(
        options,
        chunked,
        fifo=AdmissionChange(prefill_admission_policy="fifo", max_prefill_share=1.0),
        pack=AdmissionChange(
            prefill_admission_policy="pack",
            prefill_force_fifo_every=force,
            max_prefill_share=options.engine.max_prefill_share,
        ),
    )
    figures = {
        "a_ttft_p99_ratio": _ratio(a, lambda turn: percentile(turn.ttft, 99)),
        "a_ttft_p50_ratio": _ratio(a, lambda turn: percentile(turn.ttft, 50)),
        "b_short_ttft_p99_ratio": _ratio(b, lambda turn: percentile(turn.short_ttft, 99)),
        "b_short_ttft_p50_ratio": _ratio(b, lambda turn: percentile(turn.short_ttft, 50)),
        "b_ttft_p99_ratio": _ratio(b, lambda turn: percentile(turn.ttft, 99)),
        "throughput_ratio": min(
            (_ratio(arms, lambda turn: turn.num_tokens / turn.elapsed) for arms in (a, b)),
            key=lambda found: float(found["median"]),
        ),
        "tpot_p50_ratio": _ratio(b, lambda turn: percentile(turn.tpot, 50)),
    }
    medians = {name: float(found["median"]) for name, found in figures.items()}
    return {
        "model": options.engine.model,
        "pairs": options.pairs,
        **medians,
        "spread": figures,
        "a": {name: _summary(turns) for name, turns in a.items()},
        "b": {name: _summary(turns) for name, turns in b.items()},
        "checks": checks_json(admission_checks(medians)),
    }


def admission_checks(figures: dict[str, float]) -> list[Check]:
    """Goals for pack over fifo."""
    limits = {
        "a_ttft_p99_ratio": 0.70,
        "a_ttft_p50_ratio": 0.40,
        "b_short_ttft_p99_ratio": 0.40,
        "b_short_ttft_p50_ratio": 0.35,
        "b_ttft_p99_ratio": 1.10,
        "tpot_p50_ratio": 1.03,
    }
    checks = [at_most(name, figures[name], "", limit) for name, limit in limits.items()]
    return [*checks, at_least("throughput_ratio", figures["throughput_ratio"], "", 0.99)]


def _engine_config(options: AdmissionBenchOptions) -> EngineConfig:
    return replace(
        options.engine,
        max_num_seqs=options.num_prompts,
        prefill_max_batch_size=options.num_prompts,
        max_queued_requests=0,
        enable_prefix_caching=False,
    )


def _compare(
    options: AdmissionBenchOptions, config: EngineConfig, **rules: AdmissionChange
) -> dict[str, list[Turn]]:
    longest = max(_PATTERN) * options.base_len
    with _Engine(config, steps=options.output_len, input_len=longest) as engine:
        arms = {name: partial(engine.serve, options, change) for name, change in rules.items()}
        alternate(arms, 1)  # warms up
        turns = alternate(arms, options.pairs)
    for name, found in turns.items():
        note(f"{name}: TTFT p50 {percentile([percentile(t.ttft, 50) for t in found], 50):.3f} s")
    return turns


def _ratio(turns: dict[str, list[Turn]], value: Callable[[Turn], float]) -> dict[str, Any]:
    return asdict(
        spread_of_ratios(ratios(*([value(t) for t in turns[arm]] for arm in ("pack", "fifo"))))
    )


def _summary(turns: list[Turn]) -> Result:
    """Medians over the turns."""

    def middle(value: Callable[[Turn], float]) -> float:
        return percentile([value(turn) for turn in turns], 50)

    result: Result = {"tokens_per_second": middle(lambda turn: turn.num_tokens / turn.elapsed)}
    for q in (50, 95, 99):
        result[f"ttft_p{q}_ms"] = 1e3 * middle(lambda turn, q=q: percentile(turn.ttft, q))  # type: ignore[misc]  # a default binds q
    result["short_ttft_p99_ms"] = 1e3 * middle(lambda turn: percentile(turn.short_ttft, 99))
    result["tpot_p50_ms"] = 1e3 * middle(lambda turn: percentile(turn.tpot, 50))
    return result


class _Engine(DecodeEngine):
    """Times each request's tokens as the engine reports them."""

    def serve(self, options: AdmissionBenchOptions, change: AdmissionChange, number: int) -> Turn:
        """Runs the workload once, under these rules."""
        self._core.scheduler.set_admission(change)
        submits = [self._prompt(options, number, index) for index in range(options.num_prompts)]
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        start = time.monotonic()
        for submit in submits:
            self._core.add(submit)
        while self._core.has_work():
            report = self._core.step()
            now = time.monotonic()
            self._encoder.encode(report)
            for delta in report.deltas.get(_GATEWAY, ()):
                if delta.token_ids:
                    first.setdefault(delta.request_id, now)
                    last[delta.request_id] = now
        elapsed = time.monotonic() - start
        ids = [submit.request_id for submit in submits]
        gaps = max(options.output_len - 1, 1)
        return Turn(
            ttft=[first[request_id] - start for request_id in ids],
            tpot=[(last[request_id] - first[request_id]) / gaps for request_id in ids],
            elapsed=elapsed,
            num_tokens=sum(len(submit.prompt) // 4 + options.output_len for submit in submits),
        )

    def _prompt(self, options: AdmissionBenchOptions, number: int, index: int) -> Submit:
        length = _PATTERN[index % len(_PATTERN)] * options.base_len
        rng = np.random.default_rng((options.seed, number, index))
        return Submit(
            request_id=str(next(self._ids)),
            gateway_id=_GATEWAY,
            prompt=rng.integers(0, self.info.vocab_size, length).astype("<i4").tobytes(),
            sampling=SamplingParams(
                temperature=0.0, max_tokens=options.output_len, ignore_eos=True, seed=0
            ),
        )
