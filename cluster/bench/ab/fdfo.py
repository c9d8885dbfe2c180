"""`rayfleet bench fdfo`: what First Done, First Out gains over synchronous batches of blocks.

Engines of the same block-diffusion model take turns over the same prompts; the one that does not
run blocks. The variants:

    synchronous   all blocks of a batch wait for the last
    fdfo          a block that is done leaves at once; all else the same
    reentry       as fdfo, but every round ends with slot and running block given back
    fused         as fdfo, with prompts and commits riding on rounds of running blocks
    full          everything there is, at `--overlap-depth`; the others at 0, as their origins run

Besides, `full` is compared with itself at overlap depth 0, where prompts wait for a place (as in
all else here) and where none does, by which steps can be planned ahead.

All variants compute prompts beside running blocks. On long uncached prompts `synchronous` and
`fdfo` do as their origin does: prompts in passes of their own, before all running blocks and one
block each at a time, by which first done, first out can lose; and every layer computes all of a
prompt, of which the last one's queries and all that follows them go unread (`skip_unread`). Nothing
else about the engine differs between variants: products, threads and rounds are the same code. All
but `reentry` and what it is compared with run without a prefix cache. Forward passes are counted by
the engine and, independently, from the rounds of every block.

With `--replay-rounds` there are no questions: blocks take rounds by a given histogram, on weights
that may be random, and the result says so: what a schedule is worth at sizes that have no weights
here. Neither accuracy nor tokens per forward pass mean anything then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Final

import numpy as np

from cluster.bench.ab.fdfo_prompts import Prompts, long_prompts, questions, replayed_requests
from cluster.bench.ab.fdfo_variants import LONG_VARIANTS, VARIANTS, Variant
from cluster.bench.ab.forward_counts import CountedRequest, count_joined, count_separate
from cluster.bench.ab.options import FdfoOptions, rounds_of_blocks
from cluster.bench.engine import BenchEngine, Engines, Request, Turn
from cluster.bench.kernels.shapes import BLOCK_SHAPES, write_shape
from cluster.bench.report import Check, Result, at_least, at_most, checks_json, exactly, note
from cluster.bench.turns import Turns, take_turns
from worker.config import EngineConfig
from worker.models.config import load_model_config
from worker.wire.sampling import SamplingParams
from worker.wire.tokenizer import load_tokenizer

_GOALS: Final[Mapping[str, Mapping[int, float]]] = {
    "forwards_ratio": {4: 1.68, 16: 2.27},
    "fused_forwards_ratio": {4: 2.38, 16: 3.21},
    "wall_ratio": {4: 1.30, 16: 1.60},
    "inplace_ratio": {},
}
"""Goals by number of requests at once: of forward passes, what was counted on rounds per block of
mean 2.5 and deviation 2.3. Elsewhere: not less than 1."""
_LONG_GOAL: Final = 2.5
_JUDGED: Final = ("synchronous", "fdfo", "full")
_ACCURACY_SLACK: Final = 0.02
_FORWARDS: Final = "blocks.num_forwards"
_NUM_REPLAYED = 64


def run(options: FdfoOptions) -> Result:
    """Measures both workloads at every number of running requests, or a replay."""
    result: Result = {"model": options.engine.model, "pairs": options.pairs}
    if options.replay_rounds:
        checks = _run_replay(options, result)
        return {**result, "checks": checks_json(checks)}
    prompts, answers = questions(options)
    result |= {
        "algorithm": options.engine.dllm_algorithm,
        "questions": len(prompts),
        "repeats": options.repeats,
    }
    checks = []
    if "questions" in options.kinds:
        checks += _run_questions(options, prompts, answers, result)
    if "long" in options.kinds:
        checks += _run_long(options, long_prompts(options, prompts), result)
    return {**result, "checks": checks_json(checks)}


def _run_questions(
    options: FdfoOptions, prompts: Prompts, answers: Sequence[str], result: Result
) -> list[Check]:
    checks: list[Check] = []
    decode = load_tokenizer(options.engine.checkpoint).decode
    block_size = result["block_size"] = _block_size(options.engine)
    for running in options.running:
        turns = _take_turns(options, prompts, running, VARIANTS)
        result |= summarise(running, turns)
        checks += _counts(running, turns, block_size)
        checks += [
            at_least(f"{name}_{running}", result[f"{name}_{running}"], "", goals.get(running, 1.0))
            for name, goals in _GOALS.items()
        ]
        accuracies = {name: _accuracy(decode, turns[name][0], answers) for name in _JUDGED}
        result |= {f"accuracy_{name}_{running}": share for name, share in accuracies.items()}
        change = max(abs(accuracies["synchronous"] - accuracies[name]) for name in _JUDGED)
        checks.append(at_most(f"accuracy_change_{running}", change, "", _ACCURACY_SLACK))
    for running in options.running:
        result |= _overlap(options, prompts, running)
        if options.shares:
            result |= _shares(options, prompts, running, "share")
    return checks


def _run_long(options: FdfoOptions, prompts: Prompts, result: Result) -> list[Check]:
    for running in options.running:
        turns = _take_turns(options, prompts, running, LONG_VARIANTS)
        for variant, name in (("fdfo", "long_prompt_fdfo"), ("full", "long_prompt")):
            figures = _against(turns, variant, "synchronous")
            result |= {f"{name}_{key}_{running}": value for key, value in figures.items()}
    # Where many run, their prompts fill a pass even block by block.
    fewest = min(options.running)
    if options.shares:
        result |= _shares(options, prompts, fewest, "long_prompt_share")
    ratio = result[f"long_prompt_wall_ratio_{fewest}"]
    return [at_least("long_prompt_wall_ratio", ratio, "", _LONG_GOAL)]


def _run_replay(options: FdfoOptions, result: Result) -> list[Check]:
    """The same variants over blocks whose rounds are given. There are no goals for the figures."""
    histogram = rounds_of_blocks(options.replay_rounds)
    checks: list[Check] = []
    with ExitStack() as stack:
        engine = replace(options.engine, dllm_algorithm="LowConfidence", dllm_threshold=1.0)
        if engine.model in BLOCK_SHAPES:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            engine = replace(engine, model=write_shape(engine.model, directory))
        options = replace(options, engine=engine)
        weights = "random" if engine.load_format == "dummy" else "of the checkpoint"
        result |= {"replayed_rounds": histogram, "weights": weights}
        block_size = _block_size(engine)
        count = options.num_questions or _NUM_REPLAYED
        prompts, rounds = replayed_requests(histogram, block_size, count)
        for running in options.running:
            turns = _take_turns(options, prompts, running, VARIANTS, limits=rounds)
            found = [answer.rounds for answer in turns["full"][0].answers]
            assert found == [[number] for number in rounds], "a round decides one position"
            result |= summarise(running, turns)
            checks += _counts(running, turns, block_size)
    return checks


def _overlap(options: FdfoOptions, prompts: Prompts, running: int) -> Result:
    """What the host's part costs that depth 1 hides: medians over pairs of turns."""
    result: Result = {}
    with Engines() as engines:
        by_depth = {}
        for depth in (0, 1):
            engine = replace(options.engine, overlap_depth=depth)
            by_depth[str(depth)] = engines.get(VARIANTS["full"].config(engine, running))
        # In waves of as many as can run nobody ever waits for a place.
        for suffix, wave in (("", len(prompts)), ("_unqueued", running)):
            variants = {
                depth: partial(_turn, engine, prompts, [options.max_tokens] * len(prompts), wave)
                for depth, engine in by_depth.items()
            }
            figures = _against(take_turns(variants, options.pairs, warmups=1), "1", "0")
            result[f"overlap_ratio{suffix}_{running}"] = figures["wall_ratio"]
            result[f"overlap_spread{suffix}_{running}"] = figures["wall_spread"]
    return result


def _shares(options: FdfoOptions, prompts: Prompts, running: int, prefix: str) -> Result:
    """What each refinement brings beside all others; 1 where the workload has no use for it."""
    full = VARIANTS["full"]
    without = {
        name: full._replace(features=tuple(other for other in full.features if other != name))
        for name in full.features
    }
    turns = _take_turns(options, prompts, running, {"full": full, **without})
    return {f"{prefix}_{name}_{running}": _against(turns, "full", name) for name in without}


def _take_turns(
    options: FdfoOptions,
    prompts: Prompts,
    running: int,
    variants: Mapping[str, Variant],
    limits: Sequence[int] = (),
) -> Turns[Turn]:
    """Every variant on an engine of its own; `limits` as in `_turn`."""
    limits = limits or [options.max_tokens] * len(prompts)
    with Engines() as engines:
        started = {
            name: engines.get(variant.config(options.engine, running))
            for name, variant in variants.items()
        }
        exact = bool(options.replay_rounds)
        turns = {
            name: partial(_turn, engine, prompts, limits, len(prompts), exact=exact)
            for name, engine in started.items()
        }
        return take_turns(turns, options.pairs, warmups=1)


def _turn(
    engine: BenchEngine,
    prompts: Prompts,
    limits: Sequence[int],
    wave: int,
    number: int,
    *,
    exact: bool = False,
) -> Turn:
    """Answers all prompts, `wave` at once; nothing that another one cached is found.

    Args:
        engine: who answers.
        prompts: token ids.
        limits: most tokens of each.
        wave: so many are submitted at once, and the next ones when these have ended.
        number: of the turn.
        exact: every request gets all its tokens; end tokens do not count.
    """
    requests = [
        Request(
            np.asarray(prompt, dtype="<i4").tobytes(),
            SamplingParams(temperature=0.0, max_tokens=limit, seed=0, ignore_eos=exact),
            cache_salt=f"{number} {index}",
        )
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    turns = [engine.run(requests[at : at + wave]) for at in range(0, len(requests), wave)]
    return Turn(
        answers=[answer for turn in turns for answer in turn.answers],
        elapsed_s=sum(turn.elapsed_s for turn in turns),
        before=turns[0].before,
        after=turns[-1].after,
    )


def _block_size(engine: EngineConfig) -> int:
    size = load_model_config(engine.checkpoint, weights=False).block_size
    if size == 1:
        raise ValueError(f"{engine.model} is no block-diffusion model")
    return size


def _accuracy(decode: Callable[[list[int]], str], turn: Turn, answers: Sequence[str]) -> float:
    texts = [decode(answer.token_ids) for answer in turn.answers]
    return sum(text == right for text, right in zip(texts, answers, strict=True)) / len(texts)


def summarise(running: int, turns: Turns[Turn]) -> Result:
    """Figures of paired turns over the questions: medians over the pairs, with their spread."""
    rounds = [number for answer in turns["synchronous"][0].answers for number in answer.rounds]
    result: Result = {
        f"rounds_per_block_{running}": {
            "mean": float(np.mean(rounds)),
            "std": float(np.std(rounds)),
            "most": max(rounds),
        },
    }
    for variant in ("fdfo", "fused", "full"):
        figures = _against(turns, variant, "synchronous")
        result |= {f"{variant}_{name}_{running}": value for name, value in figures.items()}
    result[f"forwards_ratio_{running}"] = result.pop(f"fdfo_forwards_ratio_{running}")
    result[f"wall_ratio_{running}"] = result[f"full_wall_ratio_{running}"]
    result[f"inplace_ratio_{running}"] = _against(turns, "cached", "reentry")["wall_ratio"]
    for variant, own in turns.by_variant.items():
        forwards = int(own[0].growth(_FORWARDS))
        result[f"{variant}_{running}"] = {
            "tokens_per_second": turns.median(variant, lambda turn: turn.tokens_per_second),
            "forwards": forwards,
            "block_passes": int(own[0].growth("blocks.num_passes")),
            "tokens_per_forward": own[0].num_tokens / forwards,
        }
    note(f"{running} running: {result[f'wall_ratio_{running}']:.2f} times the synchronous speed")
    return result


def _against(turns: Turns[Turn], variant: str, baseline: str) -> Result:
    wall = turns.ratio(variant, baseline, lambda turn: turn.tokens_per_second)
    forwards = [turns[name][0].growth(_FORWARDS) for name in (baseline, variant)]
    return {
        "forwards_ratio": forwards[0] / forwards[1],
        "wall_ratio": wall.median,
        "wall_spread": asdict(wall),
    }


def _counts(running: int, turns: Turns[Turn], block_size: int) -> list[Check]:
    return [
        exactly(
            f"forwards_{variant}_{running}",
            int(turns[variant][0].growth(_FORWARDS)),
            "",
            expected_forwards(variant, turns[variant][0], running, block_size),
        )
        for variant in ("synchronous", "fdfo", "fused", "full")
    ]


def expected_forwards(variant: str, turn: Turn, running: int, block_size: int) -> int:
    """The forward passes that the independent count predicts for a variant's turn."""
    joined = variant in ("fused", "full")
    requests = [
        CountedRequest(
            prompt_blocks=answer.num_prompt // block_size,
            # Without riding, each block has a pass of its own that commits it.
            passes=tuple(number + (not joined) for number in answer.rounds),
        )
        for answer in turn.answers
    ]
    if joined:
        return count_joined(requests, running)
    return count_separate(requests, running, synchronous=variant == "synchronous")
