"""Prompt log-probabilities are returned chunk by chunk, each position once."""

from __future__ import annotations

import random

from tests.support.checkpoints.dense import VOCAB_SIZE
from tests.support.engines.engine_driver import Engine, Outcome
from worker.protocol.messages import TokenLogprobs
from worker.protocol.sampling import SamplingParams

CHUNK = 16
SCORED = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
URGENT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def prompt_of(length: int) -> list[int]:
    return [random.Random(length).randrange(VOCAB_SIZE) for _ in range(length)]


def whole(folder: str, prompt: list[int]) -> list[TokenLogprobs] | None:
    with Engine(folder, batch_invariant=True, kv_cache_tokens=512) as engine:
        [outcome] = engine.outcomes([prompt], SCORED)
    return outcome.prompt_logprobs


def test_a_delta_holds_at_most_a_chunk(folder: str) -> None:
    prompt = prompt_of(100)
    sizes: list[int] = []
    scored: list[TokenLogprobs] = []
    with Engine(
        folder, batch_invariant=True, kv_cache_tokens=512, max_num_batched_tokens=CHUNK
    ) as engine:
        engine.submit(prompt, SCORED)
        while engine.core.has_work():
            for delta in engine.core.step().deltas.get("g", ()):
                if delta.prompt_logprobs is not None:
                    sizes.append(len(delta.prompt_logprobs))
                    scored += delta.prompt_logprobs
    assert max(sizes) <= CHUNK, f"deltas of {sizes} positions"
    assert scored == whole(folder, prompt)


def test_a_prefill_that_is_preempted_sends_no_position_twice(folder: str) -> None:
    prompt = prompt_of(200)
    outputs: dict[str, Outcome] = {}
    with Engine(
        folder, batch_invariant=True, kv_cache_tokens=256, max_num_batched_tokens=CHUNK
    ) as engine:
        request_id, outcome = engine.submit(prompt, SCORED)
        outputs[request_id] = outcome
        while len(outcome.prompt_logprobs or ()) < 4 * CHUNK:
            engine.step(outputs)
        outputs.update([engine.submit(prompt_of(150), URGENT, priority=9)])
        engine.drain(outputs)
        assert engine.num_preemptions == 1
    assert outcome.prompt_logprobs == whole(folder, prompt)


def test_a_prompt_of_one_token_has_none(folder: str) -> None:
    assert whole(folder, [5]) in ([], None)
