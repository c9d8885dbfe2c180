"""The loop around scheduler and executor, with an executor that invents tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from worker.config import EngineConfig
from worker.core.engine import EngineCore
from worker.core.executor import Executor, StepFuture
from worker.plan.plan import Plan, Row, StepResult
from worker.wire.messages import Abort, EngineInfo, Submit
from worker.wire.sampling import SamplingParams

INFO = EngineInfo(
    model="invented",
    max_model_len=64,
    max_total_tokens=64,
    vocab_size=100,
    page_size=4,
    max_num_seqs=4,
    eos_token_ids=[0],
    block_hash_salt="",
)


class InventingExecutor(Executor):
    """Notes the order of launches and collections."""

    max_overlap_depth = 1

    def __init__(self) -> None:
        self.journal: list[str] = []
        self.plans: list[Plan] = []
        self.masks: list[bytes] = []
        self._tokens: Iterator[int] = iter(range(1, 10_000))

    def start(self) -> EngineInfo:
        return INFO

    def launch(self, plan: Plan) -> StepFuture:
        self.journal.append(f"launch {plan.seq}")
        self.plans.append(plan)
        tokens = [next(self._tokens) for row in plan.rows if row.sample]
        return InventedStep(self, StepResult(seq=plan.seq, token_ids=tokens, compute_ms=1.0))

    def drafts(self, seq: int) -> list[list[int]]:
        raise AssertionError("nothing is drafted here")

    def sample(self, seq: int, masks: bytes) -> None:
        self.journal.append(f"masks {seq}")
        self.masks.append(masks)

    @property
    def death_fds(self) -> list[int]:
        return []

    def raise_on_death(self) -> None:
        pass

    def close(self) -> None:
        pass


class InventedStep:
    def __init__(self, executor: InventingExecutor, result: StepResult) -> None:
        self._executor = executor
        self._result = result

    @property
    def seq(self) -> int:
        return self._result.seq

    def result(self) -> StepResult:
        self._executor.journal.append(f"result {self.seq}")
        return self._result


def submit(request_id: str, num_prompt: int = 5, max_tokens: int = 3) -> Submit:
    return Submit(
        request_id=request_id,
        gateway_id="g",
        prompt=np.arange(num_prompt, dtype="<i4").tobytes(),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0),
    )


def make_core(overlap_depth: int) -> tuple[EngineCore, InventingExecutor]:
    executor = InventingExecutor()
    config = EngineConfig(
        model="invented", page_size=4, max_num_seqs=4, overlap_depth=overlap_depth
    )
    core = EngineCore(config, INFO, executor, lambda: 0.0)
    return core, executor


def run(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.has_work():
        for delta in core.step().deltas.get("g", ()):
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        core.scheduler.check_invariants()
    return tokens


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
    assert executor.plans[4].rows == [Row(0, 8, 1, True), Row(1, 6, 1, True), Row(2, 4, 3, True)]


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
