"""A replay of a scheduler's recorded calls, from a real engine run, gives the same decisions.

Step times are measured, drafts gated by them, grammars advance at their own pace, pages are copied
from host memory if that is faster, and deadlines are near or far.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.effort import IS_LONG
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.paths import DEMO, MODELS
from tests.support.worker.recorded import Recording
from worker.core.grammar import matcher_state
from worker.protocol.admission import AdmissionChange
from worker.protocol.diffusion import DiffusionParams
from worker.protocol.messages import Abort
from worker.protocol.sampling import SamplingParams
from worker.protocol.slo import Slo
from worker.protocol.structured import StructuredOutputsParams
from worker.protocol.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

NUM_REQUESTS, NUM_OF_BLOCKS = (28, 12) if IS_LONG else (16, 8)
"""Requests of the runs; of both, every seventh aborts another one."""

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
GRAMMARS = (
    None,
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(regex=r"\d{3}-\d{4}( ext \d{1,3})?"),
)
SLOS = (None, Slo(ttft_ms=60.0, tpot_ms=15.0), Slo(e2e_ms=400.0))


def drive(engine: Engine, num_requests: int, **sampling: object) -> None:
    """Requests of all kinds arrive while steps run; some are aborted, options are changed."""
    tokenizer = load_tokenizer(engine.config.model)
    core = engine.core
    outputs: dict[str, Outcome] = {}
    num_submitted = num_steps = 0
    while num_submitted < num_requests or core.has_work() or core.grammars.num_due:
        if num_submitted < num_requests and num_steps % 3 == 0:
            n = num_submitted
            prompt = tokenizer.encode(f"Tell me of {n % 5}, and of what {'more ' * (7 * (n % 8))}?")
            params = SamplingParams(
                max_tokens=12 + 5 * (n % 5),
                temperature=0.8 * (n % 2),
                seed=n,
                structured_outputs=GRAMMARS[n % 3],
                **sampling,  # type: ignore[arg-type]
            )
            request_id, outcome = engine.submit(
                prompt,
                params,
                priority=(3, 3, 6, 3, 9, 0)[n % 6],
                slo=SLOS[(n // 2) % 3],
                tenant=("", "a", "b")[n % 3],
            )
            outputs[request_id] = outcome
            num_submitted += 1
            if n % 7 == 6:
                core.abort(Abort(request_id=str(n - 2)))
            if n == num_requests // 2:
                core.scheduler.set_admission(AdmissionChange({"prefill_admission_policy": "pack"}))
        core.take_grammars(wait=not core.has_work() and core.grammars.num_due > 0)
        engine.step(outputs)
        num_steps += 1
    assert {outcome.finish_reason for outcome in outputs.values()} >= {"stop", "length"}


@pytest.mark.randomized  # with more requests
@pytest.mark.parametrize("depth", [0, 1])
def test_a_recorded_run_replays_to_the_same_plans(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(matcher_state, "SLOW_S", 1e-4)  # some tokens are slow
    recording = Recording()
    with Engine(
        str(DEMO),
        clock=recording.clock,
        overlap_depth=depth,
        max_num_seqs=6,
        kv_cache_tokens=384,
        max_num_batched_tokens=64,
        host_cache_gib=0.01,
        speculative_method="ngram",
    ) as engine:
        scheduler = engine.core.scheduler
        recording.attach(scheduler)
        drive(engine, NUM_REQUESTS)
        assert not engine.core._guided, "matchers are released"
    assert recording.readings
    assert recording.replay(scheduler) > 40


@pytest.mark.randomized  # with more requests
def test_so_does_one_of_blocks() -> None:
    torch.set_num_threads(1)
    recording = Recording()
    with Engine(
        str(MODELS / "demo-diffusion"), clock=recording.clock, max_num_seqs=4, kv_cache_tokens=640
    ) as engine:
        scheduler = engine.core.scheduler
        recording.attach(scheduler)
        drive(engine, NUM_OF_BLOCKS, diffusion=DiffusionParams(threshold=0.6))
    assert recording.replay(scheduler) > 40
