"""Repeated submits with the same id and attempt change nothing, at any time."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.paths import DEMO
from worker.protocol.messages import SubmitBatch
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams
from worker.protocol.text.tokenizer import load_tokenizer

PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0),
    SamplingParams(max_tokens=24, structured_outputs=StructuredOutputsParams(regex=r"\d{3}-\d{9}")),
    SamplingParams(max_tokens=24, structured_outputs=StructuredOutputsParams(regex=r"[a-f]{20}")),
]


def run(engine: Engine, *, repeats_every: int) -> list[Outcome]:
    """Outcomes of a request of each kind, whose submits are repeated every `n` steps; 0 for
    never."""
    core, tokenizer = engine.core, load_tokenizer(str(DEMO))
    batches: list[SubmitBatch] = []
    receive = core.receive

    def record(batch: SubmitBatch) -> None:
        batches.append(msgspec.structs.replace(batch, submits=list(batch.submits)))
        receive(batch)

    core.receive = record  # type: ignore[method-assign]
    prompt = tokenizer.encode("Hello there")
    outputs = dict(engine.submit(prompt, params.amended(seed=1)) for params in PARAMS)
    core.receive = receive  # type: ignore[method-assign]
    num_steps = 0
    while core.has_work() or core.grammars.num_due:
        core.take_grammars(wait=not core.has_work())
        running = core.scheduler.state.requests
        if repeats_every and num_steps % repeats_every == 0:
            for batch in batches:
                if batch.submits[0].request_id in running:
                    receive(batch)
        engine.step(outputs)
        num_steps += 1
    return list(outputs.values())


@pytest.mark.parametrize("depth", [0, 1])
def test_repeated_submits_change_no_output(depth: int) -> None:
    torch.set_num_threads(1)
    with Engine(str(DEMO), kv_cache_tokens=1024, overlap_depth=depth) as engine:
        expected = run(engine, repeats_every=0)
        assert run(engine, repeats_every=1) == expected
        assert run(engine, repeats_every=3) == expected
        assert not engine.core._guided


def test_a_request_that_ended_before_its_repeated_submit_gets_a_matcher_of_its_own() -> None:
    """The first matcher may arrive after the request has ended and was submitted again."""
    torch.set_num_threads(1)
    with Engine(str(DEMO), kv_cache_tokens=1024) as engine:
        core = engine.core
        prompt = load_tokenizer(str(DEMO)).encode("Hello there")
        batches: list[SubmitBatch] = []
        receive = core.receive
        core.receive = batches.append  # type: ignore[method-assign]
        request_id, _ = engine.submit(prompt, PARAMS[1].amended(seed=1))
        for _ in range(2):
            receive(batches[0])
            core.scheduler.abort(request_id, 0)
        receive(batches[0])
        while core.has_work() or core.grammars.num_due:
            core.take_grammars(wait=not core.has_work())
            core.step()
        assert not core._guided
        assert not core.scheduler.state.requests
