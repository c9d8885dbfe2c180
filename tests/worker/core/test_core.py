"""The loop around scheduler and executor, with an executor that invents tokens."""

from __future__ import annotations

import pytest

from tests.support.worker.inventing_executor import (
    make_core,
    run,
    submit,
)
from worker.plan.plan import PlannedRow
from worker.protocol.messages import Abort


@pytest.mark.parametrize(
    ("depth", "start"),
    [
        (0, ["launch 1", "result 1", "launch 2", "result 2"]),
        # Step 1 computes the prompt: nothing is queued after it.
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
    core.step()  # step 4 has b's prompt, and is queued after a step without one
    assert executor.journal[-2:] == ["launch 4", "result 3"]
    core.add(submit("c", num_prompt=7, max_tokens=9))
    executor.journal.clear()
    core.step()
    assert executor.journal == ["result 4"]
    core.step()
    assert executor.journal == ["result 4", "launch 5"]
    assert executor.plans[4].rows == [
        PlannedRow(0, 8, 1, 1),
        PlannedRow(1, 6, 1, 1),
        PlannedRow(2, 4, 3, 1),
    ]


@pytest.mark.parametrize(("share", "max_tokens"), [(0.15, 20), (0.32, 10), (0.59, 5)])
@pytest.mark.parametrize("overlaps_prompts", [True, False])
def test_a_separate_device_never_waits_for_prompts(
    share: float, max_tokens: int, overlaps_prompts: bool
) -> None:
    """Number of steps with a prompt, beside about three decoding requests."""
    core, executor = make_core(1, overlaps_prompts=overlaps_prompts)
    num_added = 0
    while len(executor.plans) < 300:
        while num_added <= share * len(executor.plans):
            num_added += 1
            core.add(submit(str(num_added), num_prompt=3, max_tokens=max_tokens))
        core.step()
    in_flight = num_ahead = 0
    for call in executor.journal:
        num_ahead += call.startswith("launch") and in_flight > 0
        in_flight += 1 if call.startswith("launch") else -1
    with_prompts = sum(plan.rows[-1].length > 1 for plan in executor.plans) / len(executor.plans)
    assert with_prompts == pytest.approx(share, abs=0.02)
    ahead = num_ahead / len(executor.plans)
    assert ahead >= 0.98 if overlaps_prompts else ahead == pytest.approx(1 - share, abs=0.02)


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
