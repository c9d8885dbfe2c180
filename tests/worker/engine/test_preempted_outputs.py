"""Requests preempted by urgent ones generate the same tokens as alone."""

from __future__ import annotations

import random

import pytest

from tests.support.engines.engine_driver import Engine
from tests.support.engines.preempted_requests import CACHE_TOKENS, run, submits
from worker.protocol.messages import Submit


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
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
