"""The loop around scheduler and executor, with an executor that invents tokens."""

from __future__ import annotations

import pytest

from tests.support.worker.inventing_executor import (
    make_core,
    run,
    submit,
)
from worker.plan.plan import PlannedRow
from worker.wire.messages import Abort


@pytest.mark.parametrize(
    ("depth", "start"),
    [
        (0, ["launch 1", "result 1", "launch 2", "result 2"]),
        # Step 1 computes the prompt: nothing is queued behind it.
        (1, ["launch 1", "result 1", "launch 2", "launch 3", "result 2", "result 3"]),
    ],
)
def test_steps_in_flight_follow_the_depth(depth: int, start: list[str]) -> None:
    core, executor = make_core(depth)
    core.add(submit("a"))
    assert run(core) == {"a": [1, 2, 3]}
    assert executor.journal[: len(start)] == start


def test_a_request_joins_the_step_after_the_prompt_it_arrived_in() -> None:
    core, executor = make_core(1)
    core.add(submit("a", max_tokens=9))
    for _ in range(4):
        core.step()
    assert executor.journal == ["launch 1", "result 1", "launch 2", "launch 3", "result 2"]
    core.add(submit("b", num_prompt=6, max_tokens=9))
    core.step()  # step 4 has b's prompt, and is queued behind a step that has none
    assert executor.journal[-2:] == ["launch 4", "result 3"]
    core.add(submit("c", num_prompt=7, max_tokens=9))
    executor.journal.clear()
    core.step()
    assert executor.journal == ["result 4"]
    core.step()
    assert executor.journal == ["result 4", "launch 5"]
    assert executor.plans[4].rows == [
        PlannedRow(0, 8, 1, True),
        PlannedRow(1, 6, 1, True),
        PlannedRow(2, 4, 3, True),
    ]


@pytest.mark.parametrize("depth", [0, 1])
def test_an_idle_engine_has_no_work(depth: int) -> None:
    core, _ = make_core(depth)
    assert not core.has_work()
    core.add(submit("a"))
    run(core)
    assert not core.has_work()


@pytest.mark.parametrize("depth", [0, 1])
def test_an_abort_is_reported_and_leaves_nothing(depth: int) -> None:
    core, _ = make_core(depth)
    core.add(submit("a", max_tokens=50))
    core.step()
    core.abort(Abort(request_id="a"))
    reasons = []
    while core.has_work():
        reasons += [delta.finish_reason for delta in core.step().deltas.get("g", ())]
    assert reasons[-1] == "abort"
    load = core.step().load
    assert load.num_running == 0
    assert load.num_free_pages == load.num_total_pages
