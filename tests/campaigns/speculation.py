"""`make check-speculative`: checks that drafts change no tokens in any combination of features.

Prints one line per combination; exits with 1 if an outcome differs. test_speculation.py runs a
subset in every test run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cluster.cli.parser import CommandParser
from tests.support.engines.engine_driver import Outcome
from tests.support.engines.speculation_cases import (
    DRAFT,
    MODEL,
    NGRAM,
    SpeculatingEngine,
    check_grammars,
    prompts,
    run_in_waves,
    settings,
)
from tests.support.paths import MODELS
from worker.llm import LLM, Prompt, TokensPrompt
from worker.protocol.sampling import SamplingParams

NUM_PROMPTS = 300
TEMPERATURES = (0.0, 0.7, 1.3)
STOP = (".", "\n", "e, ")
SHAPES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "prefix cache": {},
    "scarce pages": {"kv_cache_tokens": 192},
    "mixed steps": {"max_num_batched_tokens": 64, "kv_cache_tokens": 4096},
    "TP 2": {"tensor_parallel_size": 2},
}
KINDS: dict[str, dict[str, Any]] = {
    "always": {},
    "at random": {"at_random": True},
    "gated": {"speculative_adaptive": True},
    "one at a time": {"num_speculative_tokens": 1},
    "up to 40": {"num_speculative_tokens": 40},
}


def base_requests(num_prompts: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests with every prompt at every temperature, with top-p; every other one with
    penalties."""
    texts = prompts(num_prompts)
    sampling = []
    for number in range(len(texts) * len(TEMPERATURES)):
        penalties: dict[str, Any] = {
            "frequency_penalty": 0.4,
            "presence_penalty": 0.2,
            "repetition_penalty": 1.1,
        }
        sampling.append(
            SamplingParams(
                seed=number,
                temperature=TEMPERATURES[number % len(TEMPERATURES)],
                top_p=0.9,
                max_tokens=40,
                **(penalties if number % 2 else {}),
            )
        )
    return [text for text in texts for _ in TEMPERATURES], sampling


def differing_texts(speculation: dict[str, Any], num_prompts: int) -> tuple[int, int]:
    """Number of texts with stop strings that drafts change, and number of texts that stopped."""
    texts: list[Prompt] = [TokensPrompt(prompt_token_ids=text) for text in prompts(num_prompts)]
    sampling = [
        SamplingParams(temperature=TEMPERATURES[i % 3], top_p=0.9, seed=i, max_tokens=40, stop=STOP)
        for i in range(num_prompts)
    ]
    found = []
    for extra in ({}, speculation):
        options = {"cpu_threads": 1, "batch_invariant": True, "kv_cache_tokens": 16384, **extra}
        with LLM(MODEL, **options) as llm:
            outputs = llm.generate(texts, sampling)
        found.append([(one.outputs[0].text, one.outputs[0].finish_reason) for one in outputs])
    stopped = sum(reason == "stop" for _, reason in found[0])
    return sum(a != b for a, b in zip(*found, strict=True)), stopped


def run_shape(
    shape: str, options: dict[str, Any], texts: Sequence[list[int]], sampling: list[SamplingParams]
) -> tuple[list[Outcome], str]:
    """Outcomes of one engine, and a remark about its run."""
    with SpeculatingEngine(**{"kv_cache_tokens": 32768, **SHAPES[shape], **options}) as engine:
        if shape == "mixed steps":
            outcomes = run_in_waves(engine, texts, sampling)
        else:
            outcomes = engine.outcomes(texts, sampling)
        if shape == "prefix cache":
            again = engine.outcomes(texts, sampling)
            assert again == outcomes, "outcomes from the cache differ"
        preempted = engine.num_preemptions
        if shape == "scarce pages":
            assert preempted, "there were enough pages"
        if options.get("speculative_method") is None:
            return outcomes, ""
        assert engine.num_accepted, "no draft was accepted: nothing was tested"
        return outcomes, f"{engine.num_accepted} of {engine.num_drafted} drafts accepted"


def combinations(draft: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, shape and options of each combination except the base."""
    methods = {"ngram": NGRAM, "draft": draft}
    for shape in SHAPES:
        for method, speculation in methods.items():
            for depth in (0, 1):
                kinds = ["always", "at random"] if depth else ["at random"]
                kinds += ["gated", "one at a time", "up to 40"] if shape == "roomy" else []
                for kind in kinds:
                    options = {**speculation, "overlap_depth": depth, **KINDS[kind]}
                    yield f"{shape}, {method}, depth {depth}, {kind}", shape, options
    yield "mixed steps, the model for itself", "mixed steps", DRAFT


def check(num_prompts: int, num_others: int) -> Iterator[tuple[str, int, int, str]]:
    """Name, number of requests, number of differences and remarks of every combination."""
    draft = {**DRAFT, "speculative_model": str(MODELS / "demo-draft")}
    texts, sampling = base_requests(num_prompts)
    expected, _ = run_shape("roomy", {}, texts, sampling)
    for method, speculation in (("ngram", NGRAM), ("draft", draft)):
        for depth in (0, 1):
            kind = KINDS["at random" if depth else "always"]
            options = {**speculation, "overlap_depth": depth, **kind}
            outcomes, remark = run_shape("roomy", options, texts, sampling)
            yield f"base, {method}, depth {depth}", len(texts), _differ(expected, outcomes), remark
    texts, sampling = prompts(num_others), settings(num_others)
    plain: dict[str, list[Outcome]] = {}
    for name, shape, options in combinations(draft):
        if shape not in plain:
            plain[shape], _ = run_shape(shape, {}, texts, sampling)
        outcomes, remark = run_shape(shape, options, texts, sampling)
        valid = check_grammars(outcomes)
        remark += f"; {valid} ended under a grammar, all valid"
        yield name, len(texts), _differ(plain[shape], outcomes), remark
    for method, speculation in (("ngram", NGRAM), ("draft", draft)):
        differing, stopped = differing_texts(speculation, num_others)
        yield f"stop strings, {method}", num_others, differing, f"{stopped} stopped"


def _differ(expected: list[Outcome], outcomes: list[Outcome]) -> int:
    return sum(a != b for a, b in zip(expected, outcomes, strict=True))


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument(
        "--others", type=int, default=54, help="prompts for combinations other than the base"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, total, wrong = time.monotonic(), 0, 0
    for name, count, differing, remark in check(args.prompts, args.others):
        total, wrong = total + count, wrong + differing
        state = "identical" if not differing else f"{differing} DIFFER"
        print(f"{name:44} {count:4} requests {state:12} {remark}", flush=True)
    print(f"{total} requests, {wrong} differ, {time.monotonic() - started:.0f} s")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
