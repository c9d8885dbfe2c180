"""A rank in its own process launches a round ahead before it waits for the previous one."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import cast

import pytest

from worker.config import EngineConfig
from worker.core.executor_remote import ProcessExecutor
from worker.plan.channel import RankChannel
from worker.plan.messages import Hello, Ready
from worker.plan.plan import BlockRow, Plan, StepResult
from worker.rank.main import _execute_plans
from worker.rank.rank import Rank, RankStep


class Step:
    """A launched step; those with windows are rounds ahead."""

    def __init__(self, plan: Plan, events: list[str]) -> None:
        self.seq, self.is_ahead, self._events = plan.seq, plan.has_windows, events
        self.sampled = self

    def result(self) -> StepResult:
        self._events.append(f"result {self.seq}")
        return StepResult(self.seq, [], 0.0)


class RecordingRank:
    def __init__(self) -> None:
        self.events: list[str] = []

    def launch(self, plan: Plan) -> RankStep:
        self.events.append(f"launch {plan.seq}")
        return cast("RankStep", Step(plan, self.events))


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rf-") as path:
        yield path


def plan(seq: int, *, is_window: bool) -> Plan:
    return Plan(seq, [], [], [BlockRow(0, 0, 8, is_window=is_window)])


def test_the_next_round_is_launched_before_a_result_is_awaited(directory: str) -> None:
    rank = RecordingRank()

    def serve() -> None:
        with closing(RankChannel(directory)) as channel:
            channel.send(Hello(0, 9, 64, 100, device="cuda", max_num_seqs=4))
            channel.receive()
            channel.send(Ready(0))
            _execute_plans(0, cast("Rank", rank), channel)

    config = EngineConfig.of(model="deploy/models/demo", max_num_batched_tokens=64)
    with closing(ProcessExecutor(config, directory, [])) as executor:
        thread = threading.Thread(target=serve)
        thread.start()
        executor.start()
        first, second = (executor.launch(plan(seq, is_window=True)) for seq in (1, 2))
        assert first().seq == 1
        assert rank.events == ["launch 1", "launch 2", "result 1"]
        # No Plan follows, so the result is requested by a message of its own.
        assert second().seq == 2
        assert executor.launch(plan(3, is_window=False))().seq == 3
    thread.join(10.0)
    assert rank.events[3:] == ["result 2", "launch 3", "result 3"]
