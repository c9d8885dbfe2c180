"""Depth 1 generates depth 0's tokens over hundreds of mixed requests; freed memory is poisoned.

At depth 1 a step runs as late as possible: when its result is requested, after the next Plan was
made and everything that the scheduler considers free was overwritten.
"""

from __future__ import annotations

import random
from collections import deque
from functools import cache

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.engines.poisoned_engine import PoisonedEngine
from tests.support.paths import DEMO
from worker.protocol.messages import Abort
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams
from worker.protocol.text.tokenizer import load_tokenizer

SCARCE_TOKENS = 768
SCHEMA = '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}'


@cache
def structured_choices() -> tuple[StructuredOutputsParams, ...]:
    return (
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(regex="[a-c]{2,9}"),
        StructuredOutputsParams(choice=("yes", "no", "perhaps so")),
        StructuredOutputsParams(grammar='root ::= "x" root "y" | "z"'),
    )


def make_requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(7)
    vocab_size = 2560
    shared = [[rng.randrange(40, vocab_size) for _ in range(96)] for _ in range(4)]
    requests = []
    for index in range(count):
        own = [rng.randrange(40, vocab_size) for _ in range(rng.choice((3, 17, 40, 120)))]
        prompt = shared[index % 4] + own if index % 3 == 0 else own
        options: dict[str, object] = {"temperature": rng.choice((0.0, 0.7, 1.3)), "seed": index}
        options |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 30}, {"min_p": 0.05}))
        kind = index % 10
        if kind == 0:
            options |= {"frequency_penalty": 0.8, "presence_penalty": 0.3}
        elif kind == 1:
            options |= {"repetition_penalty": 1.4, "logit_bias": {50: 4.0, 60: -100.0}}
        elif kind == 2:
            options |= {"stop_token_ids": tuple(range(100, 400)), "min_tokens": 3}
        elif kind == 3:
            options |= {"allowed_token_ids": tuple(range(200, 260)), "logprobs": 2}
        elif kind == 4:
            options |= {"bad_words_token_ids": ((70,), (71, 72)), "prompt_logprobs": 1}
        elif kind in (5, 6):
            options |= {"structured_outputs": structured_choices()[index // 10 % 4]}
        options["ignore_eos"] = kind != 7
        options["max_tokens"] = rng.choice((3, 5, 12, 70) if kind == 2 else (1, 5, 12, 70))
        requests.append((prompt, SamplingParams(**options)))  # type: ignore[arg-type]
    return requests


def run(engine: Engine, count: int) -> tuple[list[Outcome], dict[int, int]]:
    """Outcomes, and number of tokens after which aborted requests were aborted."""
    waiting = deque(enumerate(make_requests(count)))
    outputs: dict[str, Outcome] = {}
    aborted: dict[int, int] = {}
    while waiting or engine.core.has_work() or engine.core.grammars.num_due:
        # In waves, so that prompts and decodes mix.
        for _ in range(min(len(waiting), 4)):
            _, (prompt, sampling) = waiting.popleft()
            request_id, outcome = engine.submit(prompt, sampling)
            outputs[request_id] = outcome
        while engine.core.grammars.num_due:
            engine.core.take_grammars(wait=True)
        engine.step(outputs)
        for index, (request_id, outcome) in enumerate(outputs.items()):
            if index % 25 == 8 and index not in aborted and len(outcome.token_ids) >= 4:
                aborted[index] = 4
                engine.core.abort(Abort(request_id=request_id))
    return list(outputs.values()), aborted


def long(*values: int) -> ParameterSet:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("tensor_parallel_size", "count"), [(1, 32), (2, 28), long(1, 500), long(2, 160)]
)
def test_depth_1_equals_depth_0(tensor_parallel_size: int, count: int) -> None:
    torch.set_num_threads(1)
    options = {
        "tensor_parallel_size": tensor_parallel_size,
        "batch_invariant": True,
        "kv_cache_tokens": SCARCE_TOKENS,
        "max_num_batched_tokens": 160,
    }
    with Engine(str(DEMO), overlap_depth=0, **options) as engine:
        expected, aborted = run(engine, count)
        assert engine.num_preemptions > 0, "pages were not scarce"
    with PoisonedEngine(str(DEMO), overlap_depth=1, **options) as engine:
        actual, aborted_too = run(engine, count)
        assert engine.num_preemptions > 0
        assert engine.core.scheduler.state.stats.num_dropped_tokens > 0, "nothing ended in flight"
    assert aborted == aborted_too
    assert len(aborted) >= count // 100
    for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        known = aborted.get(index)
        assert mine.token_ids[:known] == theirs.token_ids[:known], f"request {index}"
        assert mine.finish_reason == theirs.finish_reason
        assert (mine.error, mine.ended_by_grammar) == (theirs.error, theirs.ended_by_grammar)
        if known is None:
            assert mine.logprobs == theirs.logprobs
            assert mine.prompt_logprobs == theirs.prompt_logprobs
    _check_grammars(actual)


def _check_grammars(outcomes: list[Outcome]) -> None:
    tokenizer = load_tokenizer(str(DEMO))
    texts = {"yes", "no", "perhaps so"}
    checked = 0
    for index, outcome in enumerate(outcomes):
        if index % 10 in (5, 6) and index // 10 % 4 == 2 and outcome.finish_reason == "stop":
            checked += 1
            assert tokenizer.decode(outcome.token_ids, skip_special_tokens=True) in texts
    assert checked >= len(outcomes) // 60, "choices were cut short"
