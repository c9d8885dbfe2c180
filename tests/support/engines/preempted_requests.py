"""Requests with different priorities that arrive over time; the cache is too small for them."""

from __future__ import annotations

import random

import numpy as np

from tests.support.checkpoints.dense import VOCAB_SIZE
from tests.support.engines.engine_driver import Engine
from worker.protocol.messages import Submit
from worker.protocol.sampling import SamplingParams

NUM_REQUESTS = 40
CACHE_TOKENS = 256
"""KV cache size: 1/10 of the total number of tokens."""


def submits(rng: random.Random) -> list[Submit]:
    return [
        Submit(
            request_id=f"r{i}",
            gateway_id="g",
            prompt=np.asarray(
                [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(20, 120))], "<i4"
            ).tobytes(),
            sampling=SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                seed=i,
                max_tokens=rng.randint(10, 40),
                ignore_eos=True,
            ),
            priority=rng.choice([0, 4, 9]),
        )
        for i in range(NUM_REQUESTS)
    ]


def run(engine: Engine, arrivals: dict[int, list[Submit]]) -> dict[str, list[int]]:
    """Outputs of requests that arrive in these steps."""
    outputs: dict[str, list[int]] = {}
    step = 0
    while arrivals or engine.core.has_work():
        for submit in arrivals.pop(step, ()):
            outputs[submit.request_id] = []
            engine.core.add(submit)
        step += 1
        if engine.core.has_work():
            for delta in engine.core.step().deltas.get("g", ()):
                outputs[delta.request_id] += delta.token_ids
            engine.core.scheduler.check_invariants()
    return outputs
