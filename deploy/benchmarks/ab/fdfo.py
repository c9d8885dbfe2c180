"""Benchmark `fdfo`: speedup of First Done, First Out (FDFO) over synchronous batches of blocks.

Engines with the same block-diffusion model take turns processing the same prompts. Variants:

    synchronous   all blocks of a batch wait until the last one is done
    fdfo          like synchronous, but a block leaves the batch as soon as it is done
    reentry       like fdfo, but a request releases its slot and running block after every round
    fused         like fdfo, with prompts and commits in the forward passes of running blocks
    full          all features, at `--overlap-depth`; the other variants run at depth 0, as in the
                  papers that describe them

`full` is also compared with itself at overlap depth 0, both with prompts that wait for a slot, as
in all other comparisons, and without waiting prompts, when steps can be planned ahead.

Prompts are computed in the same passes as running blocks, with one exception: on long uncached
prompts, `synchronous` and `fdfo` work as in the original papers. They compute such prompts in
separate passes, which run before those of running blocks and compute one block per prompt, so that
FDFO can be slower. Each layer also computes the whole prompt, although the last layer's queries and
everything after them are unused (`skip_unread`). Everything else in the engine is the same for all
variants. Only `reentry` and its baseline `cached` have a prefix cache. Forward passes are counted
by the engine and, independently, from the rounds of every block.

With `--replay-rounds` there are no questions: the rounds of each block are sampled from a given
histogram, and weights may be random. This compares schedules at model sizes for which no weights
are available. The result records that rounds were replayed; accuracy and tokens per forward pass
are then meaningless.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Final

import numpy as np

from cluster.bench.report import Check, Result, checks_json, exactly, note
from cluster.bench.turns import Turns, take_turns
from deploy.benchmarks.ab.fdfo_prompts import Prompts, long_prompts, questions, replayed_requests
from deploy.benchmarks.ab.forward_counts import CountedRequest, count_joined, count_separate
from deploy.benchmarks.ab.options import FdfoOptions, rounds_of_blocks
from deploy.benchmarks.ab.presets import PRESETS
from deploy.benchmarks.engine import BenchEngine, Engines, Request, Turn
from deploy.benchmarks.kernels.shapes import BLOCK_SHAPES, write_shape
from worker.config import EngineConfig
from worker.models.config.model_config import load_model_config
from worker.protocol.sampling import SamplingParams
from worker.protocol.text.tokenizer import load_tokenizer

_PRESET: Final = PRESETS["fdfo"]
_VARIANTS: Final = ("synchronous", "fdfo", "fused", "full", "cached", "reentry")
"""Variants that are measured on questions; `cached` is the baseline of `reentry`."""
_LONG_VARIANTS: Final = ("long_synchronous", "long_fdfo", "full")
_JUDGED: Final = ("synchronous", "fdfo", "full")
_FORWARDS: Final = "blocks.num_forwards"
_NUM_REPLAYED = 64


def run(options: FdfoOptions) -> Result:
    """Measures the chosen workloads, or a replay, at each number of running requests."""
    result: Result = {"model": options.engine.model, "pairs": options.pairs}
    if options.replay_rounds:
        checks = _run_replay(options, result)
        return {**result, "checks": checks_json(checks)}
    prompts, answers = questions(options)
    result |= {
        "algorithm": options.engine.dllm.algorithm,
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
        turns = _take_turns(options, prompts, _configs(options, running, _VARIANTS))
        figures = summarise(running, turns)
        result |= figures
        checks += _counts(running, turns, block_size)
        checks += _PRESET.checks(figures)
        accuracies = {name: _accuracy(decode, turns[name][0], answers) for name in _JUDGED}
        result |= {f"accuracy_{name}_{running}": share for name, share in accuracies.items()}
        change = max(abs(accuracies["synchronous"] - accuracies[name]) for name in _JUDGED)
        checks += _PRESET.checks({f"accuracy_change_{running}": change})
    for running in options.running:
        result |= _overlap(options, prompts, running)
        if options.shares:
            result |= _shares(options, prompts, running, "share")
    return checks


def _run_long(options: FdfoOptions, prompts: Prompts, result: Result) -> list[Check]:
    for running in options.running:
        turns = _take_turns(options, prompts, _configs(options, running, _LONG_VARIANTS))
        for variant, name in (("long_fdfo", "long_prompt_fdfo"), ("full", "long_prompt")):
            figures = _against(turns, variant, "long_synchronous")
            result |= {f"{name}_{key}_{running}": value for key, value in figures.items()}
    # With many running requests, prompts fill a pass even at one block per prompt.
    fewest = min(options.running)
    if options.shares:
        result |= _shares(options, prompts, fewest, "long_prompt_share")
    ratio = result[f"long_prompt_wall_ratio_{fewest}"]
    return _PRESET.checks({"long_prompt_wall_ratio": ratio})


def _run_replay(options: FdfoOptions, result: Result) -> list[Check]:
    """Measures the variants on blocks with given numbers of rounds; checks only the pass counts."""
    histogram = rounds_of_blocks(options.replay_rounds)
    checks: list[Check] = []
    with ExitStack() as stack:
        engine = options.engine.with_options(dllm_algorithm="LowConfidence", dllm_threshold=1.0)
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
            configs = _configs(options, running, _VARIANTS)
            turns = _take_turns(options, prompts, configs, limits=rounds)
            found = [answer.rounds for answer in turns["full"][0].answers]
            assert found == [[number] for number in rounds], "a round decides one position"
            result |= summarise(running, turns)
            checks += _counts(running, turns, block_size)
    return checks


def _overlap(options: FdfoOptions, prompts: Prompts, running: int) -> Result:
    """Ratios of `full` at overlap depth 1 to overlap depth 0: medians over pairs of runs."""
    result: Result = {}
    with Engines() as engines:
        by_depth = {}
        for depth in (0, 1):
            engine = options.engine.with_options(overlap_depth=depth)
            config = _PRESET.config("full", engine, max_num_seqs=running)
            by_depth[str(depth)] = engines.get(config)
        # In waves of `running` requests, none waits for a slot.
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
    """Ratios of `full` to `full` without a feature, per feature; 1 if the feature is not used."""
    full = _PRESET.config("full", options.engine, max_num_seqs=running)
    without = {name: full.with_options(dllm_disable=(name,)) for name in full.dllm.features}
    turns = _take_turns(options, prompts, {"full": full, **without})
    return {f"{prefix}_{name}_{running}": _against(turns, "full", name) for name in without}


def _configs(
    options: FdfoOptions, running: int, variants: Sequence[str]
) -> Mapping[str, EngineConfig]:
    """Configurations of variants with at most `running` requests."""
    return {name: _PRESET.config(name, options.engine, max_num_seqs=running) for name in variants}


def _take_turns(
    options: FdfoOptions,
    prompts: Prompts,
    configs: Mapping[str, EngineConfig],
    limits: Sequence[int] = (),
) -> Turns[Turn]:
    """Measures all variants in turn, each on its own engine; `limits` as in `_turn`."""
    limits = limits or [options.max_tokens] * len(prompts)
    with Engines() as engines:
        started = {name: engines.get(config) for name, config in configs.items()}
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
    """Answers all prompts in waves. Cache salts differ, so that no prompt is cached.

    Args:
        prompts: token ids of each prompt.
        limits: maximum number of tokens of each answer.
        wave: number of requests that are queued at once; the next wave is queued when all of them
            have finished.
        number: number of the run.
        exact: whether answers ignore EOS tokens, so that each reaches its limit.
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
        raise ValueError(f"{engine.model} is not a block-diffusion model: set --model to one")
    return size


def _accuracy(decode: Callable[[list[int]], str], turn: Turn, answers: Sequence[str]) -> float:
    texts = [decode(answer.token_ids) for answer in turn.answers]
    return sum(text == right for text, right in zip(texts, answers, strict=True)) / len(texts)


def summarise(running: int, turns: Turns[Turn]) -> Result:
    """Metrics of all variants at `running` requests: medians over pairs, with confidence
    intervals."""
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
    """Number of forward passes in a variant's run, computed from the rounds of its blocks
    independently of the engine."""
    joined = variant in ("fused", "full")
    requests = [
        CountedRequest(
            prompt_blocks=answer.num_prompt // block_size,
            # If commits are not fused, each block has one more pass, which commits it.
            passes=tuple(number + (not joined) for number in answer.rounds),
        )
        for answer in turn.answers
    ]
    if joined:
        return count_joined(requests, running)
    return count_separate(requests, running, synchronous=variant == "synchronous")
