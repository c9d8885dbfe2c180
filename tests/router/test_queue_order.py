"""Urgent requests are routed by what they wait for, not by queues that they overtake."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from router.fleet import Fleet, PromptBlocks
from worker.protocol.messages import (
    PROTOCOL_VERSION,
    AttachSnapshot,
    EngineInfo,
    LoadSnapshot,
    WorkerUpdate,
)

INFO = EngineInfo("m", 10_000, 10_000, 10_000, 4, 8, [0], "salt")
IDLE = LoadSnapshot(num_free_pages=2500, num_total_pages=2500, max_num_seqs=8)


class Rig:
    """A fleet of two workers, `a` and `b`; prompts share no prefix."""

    def __init__(self) -> None:
        self.fleet = Fleet(clock=lambda: 0.0)
        for worker_id in ("a", "b"):
            snapshot = AttachSnapshot(PROTOCOL_VERSION, worker_id, 1, INFO, [], IDLE)
            self.fleet.attach(worker_id, snapshot)
        self._num_prompts = 0

    def prompt(self, num_tokens: int, priority: int) -> PromptBlocks:
        self._num_prompts += 1
        tokens = np.full(num_tokens, self._num_prompts, dtype="<i4")
        blocks = PromptBlocks(tokens.tobytes())
        blocks.priority = priority
        return blocks

    def place(self, name: str, num_tokens: int, priority: int, *, on: str = "") -> str:
        others = [other for other in ("a", "b") if on and other != on]
        choice = self.fleet.reserve(name, self.prompt(num_tokens, priority), others)
        assert choice is not None
        return choice.worker_id

    def chosen(self, num_tokens: int, priority: int) -> tuple[str, float]:
        """Where such a request would be routed, and how long it would wait there."""
        choice = self.fleet.reserve("probe", self.prompt(num_tokens, priority))
        assert choice is not None
        self.fleet.release_booking(choice.worker_id, "probe")
        return choice.worker_id, choice.waiting_s


def test_a_queue_that_is_overtaken_keeps_nobody_away() -> None:
    rig = Rig()
    for name in ("r0", "r1"):
        rig.place(name, 4000, 4, on="a")
    rig.place("urgent", 2000, 7, on="b")
    assert rig.chosen(1000, 4)[0] == "b"
    assert rig.chosen(1000, 7) == ("a", pytest.approx(0.0, abs=1e-9))
    assert rig.chosen(1000, 9)[1] == pytest.approx(0.0, abs=1e-9)
    # A request that is less urgent than all of them does not wait less, either.
    assert rig.chosen(1000, 1)[0] == "b"


def test_nor_does_a_full_batch_of_prompts_that_are_overtaken() -> None:
    rig = Rig()
    for number in range(20):
        rig.place(f"a{number}", 100, 4, on="a")
    for number in range(10):
        rig.place(f"b{number}", 100, 7, on="b")
    assert rig.chosen(100, 4)[0] == "b"
    assert rig.chosen(100, 7) == ("a", pytest.approx(0.0, abs=1e-9))


def test_equals_wait_for_each_other_as_before() -> None:
    rig = Rig()
    for name, worker, length in (("r0", "a", 3000), ("r1", "b", 2000)):
        rig.place(name, length, 4, on=worker)
    worker, waiting = rig.chosen(1000, 4)
    plain = (worker, pytest.approx(waiting))
    rig.place("low", 4000, 1, on="b")
    assert rig.chosen(1000, 4) == plain
    rig.fleet.release_booking("b", "low")
    assert rig.chosen(1000, 4) == plain


def test_what_other_gateways_sent_goes_ahead() -> None:
    rig = Rig()
    queued = msgspec.structs.replace(
        IDLE, num_waiting=1, queued_prefill_tokens=4000, num_queued_tokens=4000
    )
    rig.fleet.update("a", WorkerUpdate(1, 1, [], [], queued))
    rig.place("mine", 1000, 1, on="b")
    worker, waiting = rig.chosen(500, 9)
    assert (worker, waiting) == ("b", pytest.approx(0.0, abs=1e-9))
    rig.place("urgent", 1000, 9, on="b")
    assert rig.chosen(500, 9)[0] == "b"  # 1000 tokens ahead of it there, 4000 on the other


def test_nothing_is_left_of_requests_that_are_gone() -> None:
    rig = Rig()
    for number in range(20):
        rig.place(f"r{number}", 100 + number, number % 10)
    rig.fleet.remove("a")
    for number in range(20):
        rig.fleet.release_booking("b", f"r{number}")
    assert rig.fleet.view(rig.prompt(8, 9)).queue is None
    assert rig.chosen(8, 9) == ("b", 0.0)
