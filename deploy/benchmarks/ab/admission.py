"""Benchmark `admission`: compares the admission policies fifo and pack on long and short prompts.

All requests are queued at once, and all may run concurrently. Every fourth prompt is 512 times as
long as the others, and no two prompts share a prefix. There are two settings, each on one engine
whose admission rules are changed before each run:

    a   no chunked prefill, and --budget (256) prompt tokens per step: a long prompt is prefilled
        alone; under pack, decodes wait while prompts fill the steps (`prefill_first_steps`)
    b   chunked prefill with --budget tokens per step; pack limits a prompt's share of a step to
        `max_prefill_share`, fifo does not
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Final

from cluster.bench.report import Result, checks_json, note
from cluster.bench.stats import percentile
from cluster.bench.turns import Turns, take_turns
from deploy.benchmarks.ab.options import AdmissionOptions
from deploy.benchmarks.ab.presets import PRESETS
from deploy.benchmarks.engine import BenchEngine, Request, Turn, random_prompt
from worker.config import EngineConfig
from worker.protocol.admission import AdmissionChange
from worker.protocol.options import option_values
from worker.protocol.sampling import SamplingParams

_PATTERN = (512, 1, 1, 1)
"""Lengths of consecutive prompts, in units of `base_len`."""
_PRESET: Final = PRESETS["admission"]

Figure = Callable[[Turn], float]


def run(options: AdmissionOptions) -> Result:
    """Measures settings a and b. The result has ratios of pack to fifo, and metrics per policy."""
    a, b = (_take_turns(options, *setting) for setting in _settings(options))
    ratios = {
        "a_ttft_p99_ratio": _ratio(a, lambda turn: _ttft(turn, 99)),
        "a_ttft_p50_ratio": _ratio(a, lambda turn: _ttft(turn, 50)),
        "b_short_ttft_p99_ratio": _ratio(b, lambda turn: _ttft(turn, 99, _short)),
        "b_short_ttft_p50_ratio": _ratio(b, lambda turn: _ttft(turn, 50, _short)),
        "b_ttft_p99_ratio": _ratio(b, lambda turn: _ttft(turn, 99)),
        "tpot_p50_ratio": _ratio(b, _tpot),
        "throughput_ratio": min(
            (_ratio(turns, _throughput) for turns in (a, b)), key=lambda found: found["median"]
        ),
    }
    medians = {name: float(found["median"]) for name, found in ratios.items()}
    return {
        "model": options.engine.model,
        "pairs": options.pairs,
        **medians,
        "spread": ratios,
        "a": {policy: _summary(a, policy) for policy in ("fifo", "pack")},
        "b": {policy: _summary(b, policy) for policy in ("fifo", "pack")},
        "checks": checks_json(_PRESET.checks(medians)),
    }


def _settings(
    options: AdmissionOptions,
) -> list[tuple[EngineConfig, AdmissionChange, AdmissionChange]]:
    """Engine configuration, fifo's rules and pack's rules, for settings a and b."""
    longest = max(_PATTERN) * options.base_len
    engine = options.engine.with_options(
        max_num_seqs=options.num_prompts,
        prefill_max_batch_size=options.num_prompts,
        max_queued_requests=0,
        enable_prefix_caching=False,
    )
    whole = engine.with_options(
        enable_chunked_prefill=False,
        prefill_max_tokens=options.budget,
        max_num_batched_tokens=max(2 * longest, options.budget) + options.num_prompts,
    )
    return [
        (whole, *_rules("a", options)),
        (engine.with_options(max_num_batched_tokens=options.budget), *_rules("b", options)),
    ]


def _rules(setting: str, options: AdmissionOptions) -> tuple[AdmissionChange, AdmissionChange]:
    """fifo's rules and pack's rules. Both set the same options, since they apply to the same
    engine."""
    given = option_values(options.engine) | {"prefill_force_fifo_every": options.force_fifo_every}
    fifo, pack = (_PRESET.variants[f"{setting}_{policy}"] for policy in ("fifo", "pack"))
    common = {name: given[name] for name in ("prefill_force_fifo_every", *fifo, *pack)}
    return AdmissionChange({**common, **fifo}), AdmissionChange({**common, **pack})


def _take_turns(
    options: AdmissionOptions, config: EngineConfig, fifo: AdmissionChange, pack: AdmissionChange
) -> Turns[Turn]:
    longest = max(_PATTERN) * options.base_len
    with BenchEngine(config, request_tokens=longest + 2 * options.output_len + 64) as engine:

        def serve(change: AdmissionChange, number: int) -> Turn:
            engine.core.scheduler.set_admission(change)
            return engine.run(_requests(options, engine.info.vocab_size, number))

        variants = {"fifo": partial(serve, fifo), "pack": partial(serve, pack)}
        turns = take_turns(variants, options.pairs, warmups=1)
    for policy in variants:
        note(f"{policy}: TTFT p50 {turns.median(policy, lambda turn: _ttft(turn, 50)):.3f} s")
    return turns


def _requests(options: AdmissionOptions, vocab_size: int, number: int) -> list[Request]:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=options.output_len, ignore_eos=True, seed=0
    )
    return [
        Request(
            random_prompt(
                (options.seed, number, index),
                vocab_size,
                _PATTERN[index % len(_PATTERN)] * options.base_len,
            ),
            sampling,
        )
        for index in range(options.num_prompts)
    ]


def _short(index: int) -> bool:
    return _PATTERN[index % len(_PATTERN)] == 1


def _ttft(turn: Turn, q: float, selects: Callable[[int], bool] = lambda index: True) -> float:
    """Percentile of the times to first token of the selected requests, in seconds."""
    return percentile([one.first_s for i, one in enumerate(turn.answers) if selects(i)], q)


def _tpot(turn: Turn) -> float:
    return percentile([answer.tpot_s for answer in turn.answers], 50)


def _throughput(turn: Turn) -> float:
    """Prompt and generated tokens per second."""
    return (turn.num_tokens + sum(one.num_prompt for one in turn.answers)) / turn.elapsed_s


def _ratio(turns: Turns[Turn], figure: Figure) -> Result:
    return asdict(turns.ratio("pack", "fifo", figure))


def _summary(turns: Turns[Turn], policy: str) -> Result:
    """Median metrics of a policy over its runs."""
    figures: dict[str, tuple[float, Figure]] = {
        "tokens_per_second": (1.0, _throughput),
        "ttft_p50_ms": (1e3, lambda turn: _ttft(turn, 50)),
        "ttft_p95_ms": (1e3, lambda turn: _ttft(turn, 95)),
        "ttft_p99_ms": (1e3, lambda turn: _ttft(turn, 99)),
        "short_ttft_p99_ms": (1e3, lambda turn: _ttft(turn, 99, _short)),
        "tpot_p50_ms": (1e3, _tpot),
    }
    return {name: unit * turns.median(policy, figure) for name, (unit, figure) in figures.items()}
