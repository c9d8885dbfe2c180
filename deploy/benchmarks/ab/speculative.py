"""Benchmark `speculative`: tokens per second with and without drafts, in turn.

Two engines with the same model take turns processing the same requests. One of them drafts, from
n-grams, a draft model, an MTP head or an EAGLE-3 head. The number of running requests is constant.
Each cell is a combination of a number of running requests and a kind of prompt.

    ratio     tokens per second with drafts / without, by pair of runs
    min_ratio lowest of the upper bounds of the cells' confidence intervals of the ratio
    expected  ratio predicted from acceptance and step times, as measured in the same pair:

        expected = wall(off) / (wall(off) - rank(off) + rank(on))      all per token

`rank` is rank 0's time for prompts, drafts, verification and sampling per generated token. It
reflects both the cost of steps and the acceptance rate. The rest of `wall` is spent outside the
rank, on messages and between requests, and should be the same per token without drafts. If drafting
makes this rest longer, the ratio is below the expected one. The decisions when to draft are not
checked separately, because acceptance and costs include them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Final

from cluster.bench.report import Check, Result, checks_json, note
from cluster.bench.stats import percentile
from cluster.bench.turns import Turns, take_turns
from deploy.benchmarks.ab.options import SpeculativeOptions
from deploy.benchmarks.ab.presets import PRESETS
from deploy.benchmarks.ab.tasks import make_tasks
from deploy.benchmarks.engine import BenchEngine, Engines, Request, Turn
from worker.config import EngineConfig

_PRESET: Final = PRESETS["speculative"]
_ALONE = 2.0
"""Factor by which runs with one request at a time are longer, since any pause stops all work."""
_SMALLEST_GAIN = 0.05
"""Expected gain below which the measured gain cannot be distinguished from noise."""
_RANK_TIMES: Final = tuple(f"step_times.{name}" for name in ("prepare", "forward", "sample"))
_DRAFTED, _ACCEPTED = "speculation.num_draft_tokens", "speculation.num_accepted_tokens"


def run(options: SpeculativeOptions) -> Result:
    """Measures all cells; returns the metrics of each, and checks."""
    result: Result = {"model": options.engine.model, "pairs": options.pairs}
    checks: list[Check] = []
    highs: list[float] = []
    configs = {kind: _drafting(options, kind) for kind in options.kinds}
    plain = plain_config(configs[options.kinds[0]])
    with Engines() as engines:
        off = engines.get(plain)
        for kind, config in configs.items():
            tasks = make_tasks(kind, config.checkpoint, options.questions, off.info.vocab_size)
            for running in options.running:
                turns = _take_turns(options, engines.get(config), off, tasks, running)
                figures = summarise(turns)
                figures["method"] = config.speculative.method if config.speculative else "none"
                cell = f"{kind}_{running}"
                checks += _PRESET.checks(_rated(cell, figures))
                highs.append(figures["spread"]["interval_high"])
                result |= {f"ratio_{cell}": figures["ratio"], cell: figures}
                note(
                    f"{cell}: {figures['ratio']:.3f} times the speed, "
                    f"{figures['tokens_per_step']:.2f} tokens per step, "
                    f"acceptance {figures['acceptance']:.2f}"
                )
    result["min_ratio"] = min(highs)
    checks += _PRESET.checks({"min_ratio": min(highs)})
    return {**result, "checks": checks_json(checks)}


def plain_config(drafting: EngineConfig) -> EngineConfig:
    """Configuration of the engine that does not draft. On CPU it uses torch if the drafting engine
    has to, so that ratios do not compare backends."""
    plain = _PRESET.config("off", drafting)
    return plain.with_options(cpu_backend="torch") if drafting.head_checkpoint else plain


def _drafting(options: SpeculativeOptions, kind: str) -> EngineConfig:
    # Twice the slots: an engine does not draft while all its slots are in use.
    engine = options.engine.with_options(max_num_seqs=2 * max(options.running))
    if kind != "heldout" or not options.draft_model:
        return engine
    return engine.with_options(speculative_method="draft", speculative_model=options.draft_model)


def _take_turns(
    options: SpeculativeOptions,
    on: BenchEngine,
    off: BenchEngine,
    tasks: Sequence[Request],
    running: int,
) -> Turns[Turn]:
    """Measures both engines in turn at the same number of requests; each run has new requests."""

    def turn(engine: BenchEngine, count: int, number: int) -> Turn:
        places = range(number * count, (number + 1) * count)
        return engine.run((tasks[place % len(tasks)] for place in places), at_once=running)

    least = options.per_stream * running
    trial = take_turns({"on": partial(turn, on, least), "off": partial(turn, off, least)}, 2)
    turn_s = options.turn_s * (_ALONE if running == 1 else 1.0)
    count = max(least, round(least * turn_s / trial["off"][-1].elapsed_s))
    variants = {"on": partial(turn, on, count), "off": partial(turn, off, count)}
    return take_turns(variants, options.pairs, warmups=1)  # the gate learns costs in the warm-up


def summarise(turns: Turns[Turn]) -> Result:
    """Metrics of one cell: medians over the pairs."""
    ratio = turns.ratio("on", "off", lambda turn: turn.tokens_per_second)
    expected = [
        _token_s(off) / (_token_s(off) - _busy_token_s(off) + _busy_token_s(on))
        for on, off in turns.pairs("on", "off")
    ]
    drafted = sum(turn.growth(_DRAFTED) for turn in turns["on"])
    accepted = sum(turn.growth(_ACCEPTED) for turn in turns["on"])
    return {
        "ratio": ratio.median,
        "spread": asdict(ratio),
        "expected_ratio": percentile(expected, 50.0),
        "tokens_per_step": turns.median("on", lambda turn: turn.num_tokens / turn.num_rows),
        "acceptance": accepted / max(1, drafted),
        "num_draft_tokens": int(drafted),
        "tokens_per_second": turns.median("on", lambda turn: turn.tokens_per_second),
        "plain_tokens_per_second": turns.median("off", lambda turn: turn.tokens_per_second),
        "turn_tokens": turns["on"][0].num_tokens,
        "turn_s": turns.median("on", lambda turn: turn.elapsed_s),
        "plain_turn_s": turns.median("off", lambda turn: turn.elapsed_s),
    }


def _token_s(turn: Turn) -> float:
    return turn.elapsed_s / turn.num_tokens


def _busy_token_s(turn: Turn) -> float:
    """Rank 0's time per generated token, in seconds."""
    return sum(map(turn.growth, _RANK_TIMES)) / turn.num_tokens


def _rated(cell: str, figures: Result) -> Result:
    """Metrics of a cell that can have a goal."""
    rated = {
        f"interval_{cell}": figures["spread"]["interval_high"],
        f"ratio_{cell}": figures["ratio"],
    }
    if (expected := figures["expected_ratio"] - 1.0) > _SMALLEST_GAIN:
        rated[f"of_expected_{cell}"] = (figures["ratio"] - 1.0) / expected
    return rated
