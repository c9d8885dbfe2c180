"""Complete engines on fake devices: their outputs and findings."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tests.support.checkpoints.dense import VOCAB_SIZE
from tests.support.cuda.ranks import ThreadedExecutor
from tests.support.cuda.runtime import pretended_cuda
from tests.support.effort import IS_LONG
from tests.support.engines.block_engine import BlockEngine
from tests.support.engines.engine_driver import Engine
from worker.protocol.sampling import SamplingParams
from worker.rank.runner import ModelRunner

OPTIONS: dict[str, Any] = {
    "host_cache_gib": 0.0,
    "kv_cache_tokens": 256,
    "page_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "frequency_penalty": 0.7, "logprobs": 2},
    {"temperature": 0.7, "top_k": 20, "stop_token_ids": [*range(0, VOCAB_SIZE, 40)]},
    {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 4},
    {"temperature": 0.6, "logprobs": 0, "logprob_token_ids": (7, 3)},
    {"temperature": 0.9, "min_p": 0.05, "prompt_logprobs": 1},
]
CAPTURED = (1, 2, 4, 32) if IS_LONG else (1, 4, 32)
"""Numbers of rows or tokens to capture steps for."""
LENGTHS = (3, 60, 14, 47, 20, 33, 9, 5)
DRAFTS = {"speculative_method": "ngram", "speculative_adaptive": False}
HOST = {"host_cache_gib": 0.001, "host_cache_policy": "always", "kv_cache_tokens": 96}


def by_model(folder: str) -> dict[str, Any]:
    """Options for drafting with a model."""
    return {
        "speculative_method": "draft",
        "speculative_model": folder,
        "speculative_adaptive": False,
    }


class Served(NamedTuple):
    tokens: list[list[int]]
    findings: list[str]
    waits: list[str]
    """Waits during serving."""
    num_launches: int
    num_loaded: int
    """Pages loaded from host memory."""


def prompts(count: int = len(LENGTHS), repeats: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [repeats * rng.integers(0, VOCAB_SIZE, n).tolist() for n in LENGTHS[:count]]


def params(count: int = len(LENGTHS), max_tokens: int = 12) -> list[SamplingParams]:
    return [
        SamplingParams(seed=i, max_tokens=max_tokens, ignore_eos=True, **KINDS[i % len(KINDS)])
        for i in range(count)
    ]


def outcomes(engine: Engine, *arguments: Any) -> list[list[int]]:
    serve = engine.serve if isinstance(engine, BlockEngine) else engine.outcomes
    return [outcome.token_ids for outcome in serve(*arguments)]


def on_cuda(
    folder: str,
    given: Sequence[Sequence[int]],
    arguments: Any,
    *,
    kind: type[Engine] = Engine,
    num_ranks: int = 1,
    meddle: Callable[[ModelRunner], object] = lambda _: None,
    warms_up: bool = False,
    **options: Any,
) -> Served:
    options = {"cudagraph_capture_sizes": CAPTURED, **OPTIONS, **options}
    with pretended_cuda(warms_up=warms_up) as world, world.rank() as clocks:
        if num_ranks > 1:
            options["tensor_parallel_size"] = num_ranks
            own = {"executor_class": partial(ThreadedExecutor, world)}
            kind = type("ThreadedEngine", (kind,), own)
        with kind(folder, device="cuda", **options) as engine:
            meddle(engine.runner)
            world.waits.clear()
            before = clocks.num_launches
            tokens = outcomes(engine, given, arguments)
            num_launches = clocks.num_launches - before
            waits = list(world.waits)
            host = engine.core.scheduler.take_report().load.host_cache
        del engine
        gc.collect()  # memory is unpinned here
        num_loaded = 0 if host is None else host.num_loaded
        return Served(tokens, list(world.findings), waits, num_launches, num_loaded)


def on_cpu(folder: str, *arguments: Any, kind: type[Engine] = Engine, **options: Any) -> Any:
    with kind(folder, cpu_backend="torch", **{**OPTIONS, **options}) as engine:
        return outcomes(engine, *arguments)
