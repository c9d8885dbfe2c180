"""`rayfleet bench speculative`: tokens per second with and without drafts, in turn.

Two engines of the same model, one of which drafts, take turns at the same requests; the one that
does not run blocks. A fixed number of requests runs at any time. Every cell is one number of
requests and one kind of prompts.

    ratio     tokens per second with drafts / without, pair by pair
    min_ratio the least of the cells' upper ends of the median's confidence interval
    expected  what acceptance and steps' costs predict, both as measured in the same pair:

        expected = wall(off) / (wall(off) - rank(off) + rank(on))      all per token

`rank` is rank 0's time for prompts, drafts, verification and draws over the tokens that came of it:
what steps cost, by what acceptance makes of them. The rest of `wall` passes outside of it, between
requests and in messages. Drafts cannot touch that, so it counts per token as it does without them;
where drafting made it longer, the ratio falls short of what is expected. How good the gate's
choices are is not in it: they decide what acceptance and costs are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial

from cluster.bench.alternate import alternate
from cluster.bench.report import Check, Result, at_least, checks_json, note
from cluster.bench.speculative_engine import SpeculativeEngine, Turn
from cluster.bench.speculative_prompts import KINDS, Task, make_tasks
from cluster.bench.stats import percentile, ratios, spread_of_ratios
from worker.config import EngineConfig

LEAST_PAIRS = 10
_GOALS = {("heldout", 1): 1.3, ("copy", 1): 2.0}
_NEVER_BELOW = 0.98
_ALONE = 2.0
"""Turns of one request at a time are so many times as long: each hold-up hits all of it."""
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
    draft_model: str = ""
    """For held-out prompts, which n-grams cannot guess; empty drafts for all by `engine`'s method.
    """
    per_stream: int = 4
    """Least requests of a turn, for each that runs at once."""
    turn_s: float = 0.8
    """About how long the plain engine's turns take; twice that with one request at a time."""

    def __post_init__(self) -> None:
        if self.engine.speculative_method == "none":
            raise ValueError("--speculative-method none drafts nothing: give another one")
        if self.turn_s < 0.0:
            raise ValueError("--turn-seconds must not be negative")
        if self.pairs < 1 or self.per_stream < 1 or not self.running or min(self.running) < 1:
            raise ValueError("--pairs, --per-stream and all of --running must be at least 1")
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"--kinds: {unknown[0]} is none of {', '.join(KINDS)}")


def run_speculative(options: SpeculativeOptions) -> Result:
    """Measures every cell."""
    result: Result = {
        "model": options.engine.model,
        "pairs": options.pairs,
    }
    checks: list[Check] = []
    highs: list[float] = []
    configs = {kind: _drafting(options, kind) for kind in options.kinds}
    with ExitStack() as stack:
        plain = replace(configs[options.kinds[0]], speculative_method="none", speculative_model="")
        off = stack.enter_context(SpeculativeEngine(plain))
        drafting = {
            config: stack.enter_context(SpeculativeEngine(config))
            for config in dict.fromkeys(configs.values())
        }
        for kind, config in configs.items():
            tasks = make_tasks(kind, config.checkpoint, options.questions, off.info.vocab_size)
            engines = {"on": drafting[config], "off": off}
            for running in options.running:
                turns = _measure(options, engines, tasks, running)
                figures = summarise(turns["on"], turns["off"])
                figures["method"] = config.speculative_method
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


def _drafting(options: SpeculativeOptions, kind: str) -> EngineConfig:
    # Slots to spare: a full worker does not draft, whatever that would gain.
    engine = replace(options.engine, max_num_seqs=2 * max(options.running))
    if kind != "heldout" or not options.draft_model:
        return engine
    return replace(engine, speculative_method="draft", speculative_model=options.draft_model)


def _measure(
    options: SpeculativeOptions,
    engines: Mapping[str, SpeculativeEngine],
    tasks: Sequence[Task],
    running: int,
) -> dict[str, list[Turn]]:
    """Turns of each engine; both work off as many requests."""

    def arms(count: int) -> dict[str, Callable[[int], Turn]]:
        return {
            name: partial(engine.turn, tasks, running, count) for name, engine in engines.items()
        }

    least = options.per_stream * running
    warm = alternate(arms(least), 2)["off"][-1]
    turn_s = options.turn_s * (_ALONE if running == 1 else 1.0)
    count = max(least, round(least * turn_s / warm.elapsed_s))
    alternate(arms(count), 1)  # a gate learns what such turns are like
    return alternate(arms(count), options.pairs)


def summarise(on: list[Turn], off: list[Turn]) -> Result:
    """Figures of one cell: medians over the pairs."""
    gains = ratios([turn.tokens_per_second for turn in on], [t.tokens_per_second for t in off])
    expected = [
        b.token_s / (b.token_s - b.busy_token_s + a.busy_token_s)
        for a, b in zip(on, off, strict=True)
    ]
    drafted = sum(turn.num_draft_tokens for turn in on)
    return {
        "ratio": percentile(gains, 50.0),
        "spread": asdict(spread_of_ratios(gains)),
        "expected_ratio": percentile(expected, 50.0),
        "tokens_per_step": percentile([turn.tokens_per_row for turn in on], 50.0),
        "acceptance": sum(turn.num_accepted_tokens for turn in on) / max(1, drafted),
        "num_draft_tokens": drafted,
        "tokens_per_second": percentile([turn.tokens_per_second for turn in on], 50.0),
        "plain_tokens_per_second": percentile([turn.tokens_per_second for turn in off], 50.0),
        "turn_tokens": on[0].num_tokens,
        "turn_s": percentile([turn.elapsed_s for turn in on], 50.0),
        "plain_turn_s": percentile([turn.elapsed_s for turn in off], 50.0),
    }


def _checks(kind: str, running: int, figures: Result) -> list[Check]:
    cell = f"{kind}_{running}"
    gain, expected = figures["ratio"] - 1.0, figures["expected_ratio"] - 1.0
    checks = [
        at_least(f"interval_{cell}", figures["spread"]["interval_high"], "", _NEVER_BELOW),
    ]
    if (kind, running) in _GOALS:
        checks.append(at_least(f"ratio_{cell}", figures["ratio"], "", _GOALS[kind, running]))
    else:
        goal = f"interval reaches {_NEVER_BELOW}"
        holds = checks[0].holds
        checks.append(
            Check(name=f"ratio_{cell}", value=figures["ratio"], unit="", goal=goal, holds=holds)
        )
    if expected > 0.05:  # less is lost in the noise
        checks.append(at_least(f"of_expected_{cell}", gain / expected, "", _OF_EXPECTED))
    return checks
