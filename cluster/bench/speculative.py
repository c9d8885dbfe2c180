"""`rayfleet bench speculative`: tokens per second with and without drafts, in turn.

Two engines of the same model, one of which drafts, take turns at the same requests; the one that
does not run blocks. A fixed number of requests runs at any time. Every cell is one number of
requests and one kind of prompts.

    ratio     tokens per second with drafts / without, pair by pair
    min_ratio the least of the cells' upper ends of the median's confidence interval
    expected  what acceptance and steps' times predict: tokens per step over step time, both as
              quotients of the two engines
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial

from cluster.bench.alternate import alternate
from cluster.bench.report import Check, Result, at_least, checks_json, note
from cluster.bench.speculative_engine import SpeculativeEngine, Turn
from cluster.bench.speculative_prompts import KINDS, make_tasks
from cluster.bench.stats import percentile, ratios, spread
from worker.engine.config import EngineConfig

LEAST_PAIRS = 10
_GOALS = {("heldout", 1): 1.3, ("copy", 1): 2.0}
_NEVER_BELOW = 0.98
_LEAST_REQUESTS = 24
"""Of a turn: shorter ones are over before they can be told apart."""
_OF_EXPECTED = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeOptions:
    """What runs; the benchmark sets `engine.max_num_seqs`, and the method of one engine to none."""

    engine: EngineConfig
    questions: str
    """JSON lines with held-out questions."""
    running: tuple[int, ...] = (1, 4, 16, 32)
    kinds: tuple[str, ...] = KINDS
    pairs: int = LEAST_PAIRS
    per_stream: int = 4
    """Requests of a turn, for each that runs at once."""

    def __post_init__(self) -> None:
        if self.engine.speculative_method == "none":
            raise ValueError("--speculative-method none drafts nothing: give another one")
        if self.pairs < 1 or self.per_stream < 1 or not self.running or min(self.running) < 1:
            raise ValueError("--pairs, --per-stream and all of --running must be at least 1")
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"--kinds: {unknown[0]} is none of {', '.join(KINDS)}")


def run_speculative(options: SpeculativeOptions) -> Result:
    """Measures every cell."""
    result: Result = {
        "model": options.engine.model,
        "method": options.engine.speculative_method,
        "pairs": options.pairs,
    }
    checks: list[Check] = []
    highs: list[float] = []
    with ExitStack() as stack:
        # Slots to spare: a full worker does not draft, whatever that would gain.
        config = replace(options.engine, max_num_seqs=2 * max(options.running))
        engines = {
            "on": stack.enter_context(SpeculativeEngine(config)),
            "off": stack.enter_context(
                SpeculativeEngine(replace(config, speculative_method="none", speculative_model=""))
            ),
        }
        vocab_size = engines["on"].info.vocab_size
        for kind in options.kinds:
            tasks = make_tasks(kind, config.model, options.questions, vocab_size)
            for running in options.running:
                count = max(options.per_stream * running, _LEAST_REQUESTS)
                arms = {
                    name: partial(engine.turn, tasks, running, count)
                    for name, engine in engines.items()
                }
                alternate(arms, 1)  # warms up
                turns = alternate(arms, options.pairs)
                figures = summarise(turns["on"], turns["off"])
                cell = f"{kind}_{running}"
                checks += _checks(kind, running, figures)
                highs.append(figures["spread"]["interval_high"])
                result |= {f"ratio_{cell}": figures["ratio"], cell: figures}
                note(
                    f"{cell}: {figures['ratio']:.3f} times the speed, "
                    f"{figures['tokens_per_step']:.2f} tokens per step, "
                    f"acceptance {figures['acceptance']:.2f}"
                )
    result["min_ratio"] = min(highs)
    checks.append(at_least("min_ratio", min(highs), "", _NEVER_BELOW))
    return {**result, "checks": checks_json(checks)}


def summarise(on: list[Turn], off: list[Turn]) -> Result:
    """Figures of one cell: medians over the pairs."""
    gains = ratios([turn.tokens_per_second for turn in on], [t.tokens_per_second for t in off])
    expected = [
        a.tokens_per_row / b.tokens_per_row * b.row_s / a.row_s
        for a, b in zip(on, off, strict=True)
    ]
    drafted = sum(turn.num_draft_tokens for turn in on)
    return {
        "ratio": percentile(gains, 50.0),
        "spread": asdict(spread(gains)),
        "expected_ratio": percentile(expected, 50.0),
        "tokens_per_step": percentile([turn.tokens_per_row for turn in on], 50.0),
        "acceptance": sum(turn.num_accepted_tokens for turn in on) / max(1, drafted),
        "num_draft_tokens": drafted,
        "tokens_per_second": percentile([turn.tokens_per_second for turn in on], 50.0),
        "plain_tokens_per_second": percentile([turn.tokens_per_second for turn in off], 50.0),
    }


def _checks(kind: str, running: int, figures: Result) -> list[Check]:
    cell = f"{kind}_{running}"
    gain, expected = figures["ratio"] - 1.0, figures["expected_ratio"] - 1.0
    checks = [
        at_least(f"interval_{cell}", figures["spread"]["interval_high"], "", _NEVER_BELOW),
    ]
    if (kind, running) in _GOALS:
        checks.append(at_least(f"ratio_{cell}", figures["ratio"], "", _GOALS[kind, running]))
    if expected > 0.05:  # less is lost in the noise
        checks.append(at_least(f"of_expected_{cell}", gain / expected, "", _OF_EXPECTED))
    return checks
