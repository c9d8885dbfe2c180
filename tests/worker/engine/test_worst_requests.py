"""Worst allowed requests: each field that clients may set, and each pair of them, at its limit.

After any request has ended, other requests' steps and the rank's memory are as before; while it
runs, a step takes at most 1.2 times as long. Work is counted in elements that torch's operators
write, which does not depend on the machine's load.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, get_type_hints

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from router.api.openai.protocol import MAX_BAD_WORDS, MAX_STOP_STRINGS, MAX_STOP_TOKENS
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.paths import DEMO
from worker.core.executor_local import LocalExecutor
from worker.protocol.sampling import (
    MAX_BAD_WORDS_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKENS,
    MAX_LOGPROBS,
    SamplingParams,
)
from worker.protocol.structured import StructuredOutputsParams
from worker.rank.sampling.logits_processors import table_bytes

pytestmark = pytest.mark.slow

VOCAB = 2560
NUM_SEQS = 8
LENGTH = 4
"""Output tokens of a request."""
PROMPT = list(range(100, 116))
ALLOCATOR_SLACK = 8 << 20
"""Bytes that the C library's and Python's arenas may keep: an eighth of an arena's 64 MiB."""
FREE = {"seed", "max_tokens", "skip_special_tokens", "include_stop_str_in_output", "ignore_eos"}
"""Fields without a size: any value costs the same."""
ELSEWHERE = {"stop", "thought", "diffusion", "bad_words", "pooling"}
"""Fields that an autoregressive model's rank does not see, or sees under another name."""

WORST: dict[str, tuple[dict[str, Any], ...]] = {
    "n": ({"n": 4},),
    "temperature": ({"temperature": 1.0},),
    "top_p": ({"top_p": 0.9, "temperature": 1.0},),
    "top_k": ({"top_k": VOCAB - 1, "temperature": 1.0},),
    "min_p": ({"min_p": 0.01, "temperature": 1.0},),
    "min_tokens": ({"min_tokens": LENGTH},),
    "frequency_penalty": ({"frequency_penalty": 0.1},),
    "presence_penalty": ({"presence_penalty": 0.1},),
    "repetition_penalty": ({"repetition_penalty": 1.1},),
    "logit_bias": ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES), 0.1)},),
    "bad_words_token_ids": (
        {"bad_words_token_ids": ((7,) * MAX_BAD_WORDS_TOKENS,)},
        {"bad_words_token_ids": ((7, 8),) * (MAX_BAD_WORDS_TOKENS // 2)},
        {"bad_words_token_ids": ((7,) * (MAX_BAD_WORDS_TOKENS // MAX_BAD_WORDS),) * MAX_BAD_WORDS},
    ),
    "allowed_token_ids": ({"allowed_token_ids": tuple(range(VOCAB))},),
    "logprobs": ({"logprobs": MAX_LOGPROBS},),
    "logprob_token_ids": ({"logprobs": 0, "logprob_token_ids": tuple(range(MAX_LOGPROB_TOKENS))},),
    "prompt_logprobs": ({"prompt_logprobs": MAX_LOGPROBS},),
    "stop_token_ids": (
        {"stop_token_ids": tuple(range(VOCAB - MAX_STOP_TOKENS, VOCAB)), "min_tokens": LENGTH},
    ),
    "structured_outputs": ({"structured_outputs": StructuredOutputsParams(regex="[a-z ]{40}")},),
}
"""The largest values of each field, by name."""
LISTS = {"logit_bias", "bad_words_token_ids", "allowed_token_ids", "stop_token_ids"}
"""Fields that hold lists, whose pairs are always tested; other pairs only in `check-long`."""


def pairs() -> Iterator[Any]:
    """Each pair of values of two fields; of lists, the first values are always tested."""
    for names in itertools.combinations(WORST, 2):
        for index, (one, other) in enumerate(itertools.product(*(WORST[name] for name in names))):
            marks = [] if LISTS.issuperset(names) and index == 0 else [pytest.mark.long]
            yield pytest.param({**one, **other}, id="-".join(names), marks=marks)


SINGLE = [pytest.param(one, id=name) for name, values in WORST.items() for one in values]


def test_every_field_of_a_request_has_its_worst_value_here() -> None:
    assert set(get_type_hints(SamplingParams)) == WORST.keys() | FREE | ELSEWHERE
    assert MAX_STOP_STRINGS, "stop strings are matched by the gateway"


class ElementCount(TorchDispatchMode):
    """Counts the elements of all tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, torch.Tensor) and not func.is_view:
                self.total += one.numel()
        return result


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # `rank_bytes` considers each object created from here on
    with Engine(
        str(DEMO),
        kv_cache_tokens=4096,
        max_num_seqs=NUM_SEQS,
        max_model_len=128,
        cpu_backend="torch",
    ) as started:
        rest: dict[str, Any] = {"logit_bias": {5: 0.1}, "frequency_penalty": 0.1}
        run(started, [{**rest, "allowed_token_ids": (5, 6, 7)}])  # creates all tables
        yield started
    gc.unfreeze()


def run(engine: Engine, params: list[dict[str, Any]], *, counts: bool = True) -> tuple[int, float]:
    """Steps until these requests have ended; elements and seconds of the average step.

    Bystanders have a bias and a penalty each, so that they use the shared tables.
    """
    core = engine.core
    outputs: dict[str, Outcome] = {}
    for one in params:
        rest = {"temperature": 0.0, "ignore_eos": True, **one, "max_tokens": LENGTH, "seed": 1}
        for _ in range(rest.pop("n", 1)):
            request_id, outcome = engine.submit(PROMPT, SamplingParams(**rest))
            outputs[request_id] = outcome
    while core.grammars.num_due:
        core.take_grammars(wait=True)
    num_steps, elements, began = 0, ElementCount(), time.perf_counter()
    with elements if counts else nullcontext():
        while core.has_work():
            engine.step(outputs)
            num_steps += 1
    assert all(outcome.error is None for outcome in outputs.values())
    return elements.total // num_steps, (time.perf_counter() - began) / num_steps


OTHERS = [{"logit_bias": {5: 0.1}, "repetition_penalty": 1.1}] * 4
PLAIN: dict[str, Any] = {"temperature": 1.0}


def rank_bytes(engine: Engine) -> int:
    """Bytes of all tensors that are alive in this process, in which the rank runs."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    storages = [one.untyped_storage() for one in tensors if one.layout is torch.strided]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def check(engine: Engine, worst: dict[str, Any]) -> None:
    plain = [*OTHERS, *[PLAIN] * worst.get("n", 1)]
    before, _ = run(engine, plain)
    held = rank_bytes(engine)
    during, _ = run(engine, [*OTHERS, worst])
    assert rank_bytes(engine) == held
    after, _ = run(engine, plain)
    assert after == before
    assert during <= 1.2 * before, f"{during / before:.2f} times the work"


@pytest.mark.parametrize("worst", SINGLE)
def test_a_field_at_its_limit(engine: Engine, worst: dict[str, Any]) -> None:
    check(engine, worst)


@pytest.mark.parametrize("worst", list(pairs()))
def test_two_fields_at_their_limits(engine: Engine, worst: dict[str, Any]) -> None:
    check(engine, worst)


@pytest.mark.long
@pytest.mark.parametrize("worst", SINGLE)
def test_steps_take_as_long_after_a_request_as_before(
    engine: Engine, worst: dict[str, Any]
) -> None:
    """Best of several runs, since the machine may be loaded; memory is as before, too."""
    plain = [*OTHERS, *[PLAIN] * worst.get("n", 1)]
    run(engine, [*OTHERS, worst], counts=False)  # one-time allocations
    resident = psutil.Process().memory_info().rss
    before, during, after = (
        min(run(engine, params, counts=False)[1] for _ in range(5))
        for params in (plain, [*OTHERS, worst], plain)
    )
    grown = psutil.Process().memory_info().rss - resident
    assert grown <= ALLOCATOR_SLACK, f"{grown / 2**20:.1f} MiB more are resident"
    assert during <= 1.2 * before, f"{during / before:.2f} times as long"
    assert after <= 1.1 * before, f"{after / before:.2f} times as long"


def test_tables_are_as_large_as_planned(engine: Engine) -> None:
    executor = engine._executor
    assert isinstance(executor, LocalExecutor)
    sampling = executor._rank.runner._tables.sampling
    edits, penalties = sampling._edits._edits, sampling._penalties
    assert edits is not None
    tensors = [edits.bias_tokens, edits.biases, edits.words, edits.word_ends]
    made = [*tensors, sampling._masks._masks, penalties._in_prompt, penalties._counts]
    assert sum(one.nbytes for one in made if one is not None) == table_bytes(NUM_SEQS + 1, VOCAB)
