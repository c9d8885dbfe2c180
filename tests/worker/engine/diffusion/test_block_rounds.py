"""Number of passes of the two execution modes, counted exactly."""

from __future__ import annotations

import pytest

from tests.support.engines.invented_model import InventedEngine
from worker.protocol.sampling import SamplingParams

SEPARATE = ("fused_commit", "skip_last_commit", "early_exit")
"""Without these, a block's last pass is a separate one."""


def run(**options: object) -> InventedEngine:
    """Three requests of one block each with 2, 7 and 1 undecided positions, one decided per
    round."""
    engine = InventedEngine(8, flat=True, **options)
    for request_id, (num_prompt, num_new) in enumerate([(6, 2), (1, 7), (7, 1)]):
        sampling = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        engine.add(str(request_id), [5] * num_prompt, sampling)
    while engine.scheduler.has_work():
        engine.step()
    return engine


def test_rows_of_three_eight_and_two_passes() -> None:
    synchronous = run(dllm_fdfo=False, dllm_disable=SEPARATE)
    assert (synchronous.num_forwards, synchronous.num_row_steps) == (8, 24)
    engine = run(dllm_fdfo=True, dllm_disable=SEPARATE)
    assert (engine.num_forwards, engine.num_row_steps) == (8, 13)


@pytest.mark.parametrize(("fdfo", "row_steps"), [(False, 21), (True, 10)])
def test_the_last_block_needs_no_pass_of_its_own(fdfo: bool, row_steps: int) -> None:
    engine = run(dllm_fdfo=fdfo, dllm_disable=("fused_commit",))
    assert (engine.num_forwards, engine.num_row_steps) == (7, row_steps)


def test_the_rank_continues_while_nothing_is_done() -> None:
    """The rank returns to the scheduler when a block is done, and at least every eight rounds."""
    steps = {}
    for disable in ((), ("inplace",)):
        engine = InventedEngine(32, flat=True, dllm_disable=disable)
        sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        engine.add("a", [5] * 2, sampling)
        steps[disable] = 0
        while engine.scheduler.has_work():
            engine.step()
            steps[disable] += 1
        assert engine.num_forwards == 30
    assert steps == {(): 4, ("inplace",): 30}


def test_commits_ride_on_the_next_block() -> None:
    """Four blocks, one position per round: 32 rounds, and 3 more passes with separate commits."""
    for disable, forwards in (((), 32), (("fused_commit",), 35), (SEPARATE, 36)):
        engine = InventedEngine(8, flat=True, dllm_disable=disable)
        sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        engine.add("a", [5] * 8, sampling)
        while engine.scheduler.has_work():
            engine.step()
        # A prompt of whole blocks is computed with the first round, or in a separate pass.
        assert engine.num_forwards == forwards + (disable != ())


def test_steps_are_measured_by_their_average_pass() -> None:
    """Two whole blocks of prompt and one running block, then seven passes over the running
    block."""
    engine = InventedEngine(8, flat=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    engine.add("a", [5] * 16, sampling)
    load = engine.step().load
    assert load.step_ms == 1.0 / 8
    assert load.step_shape.prefill_tokens == (3 * 8 + 7 * 8) // 8
    whole = 3 * 8 * (3 * 8 + 1) // 2
    assert load.step_shape.prefill_attended == (whole + 7 * 8 * 24) // 8
    assert load.step_shape.decode_rows == 0
