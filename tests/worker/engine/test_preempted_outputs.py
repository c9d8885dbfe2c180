"""Requests that urgent ones take the place of yield the very tokens that they yield alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints.dense import VOCAB_SIZE, write_checkpoint
from tests.support.engines.engine_driver import Engine
from worker.wire.messages import Submit
from worker.wire.sampling import SamplingParams

NUM_REQUESTS = 40
CACHE_TOKENS = 256
"""One in ten of what they need all together."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", Path(path))
    return str(path)


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
    """Outputs of requests that arrive at these steps."""
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


@pytest.mark.parametrize("seed", [1, 2])
def test_outputs_equal_those_of_undisturbed_requests(folder: str, seed: int) -> None:
    rng = random.Random(seed)
    requests = submits(rng)
    with Engine(
        folder, batch_invariant=True, kv_cache_tokens=16384, preempt_priority_gap=0
    ) as engine:
        undisturbed = run(engine, {0: requests})
    arrivals: dict[int, list[Submit]] = {}
    for submit in requests:
        arrivals.setdefault(rng.randrange(250 if submit.priority == 9 else 30), []).append(submit)
    with Engine(
        folder,
        batch_invariant=True,
        kv_cache_tokens=CACHE_TOKENS,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        prefill_admission_policy=rng.choice(["fifo", "pack"]),
    ) as engine:
        disturbed = run(engine, arrivals)
        assert engine.num_preemptions >= 5, "hardly anybody was preempted"
    assert disturbed == undisturbed
