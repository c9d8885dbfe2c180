"""How a rank ends: its failure is told first, its graphs end before its group, nothing hangs."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch

from worker.config import EngineConfig
from worker.models import tensor_parallel
from worker.models.tensor_parallel import TensorParallelGroup
from worker.plan.messages import Failure
from worker.rank import main
from worker.rank.rank import Rank


class Ended(BaseException):
    pass


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a rank that fails while it loads does, in order; its group ends at once."""
    found: list[str] = []

    class Channel:
        def __init__(self, *_: Any) -> None:
            pass

        def send(self, message: Any) -> None:
            assert isinstance(message, Failure)
            found.append(f"told {message.error.splitlines()[-1]}")

        def close(self) -> None:
            found.append("channel closed")

    def fail(rank: Rank, group: TensorParallelGroup) -> None:
        rank._group = group
        raise RuntimeError("out of memory")

    def end(_: TensorParallelGroup) -> bool:
        found.append("group ended")
        return True

    monkeypatch.setattr(main, "RankChannel", Channel)
    monkeypatch.setattr(Rank, "load", fail)
    monkeypatch.setattr(TensorParallelGroup, "close", end)
    return found


def test_a_failure_is_told_before_the_group_ends(events: list[str]) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        main.run_rank(0, EngineConfig(model="none", device="cpu"), "")
    assert events == ["told RuntimeError: out of memory", "group ended", "channel closed"]


def test_a_rank_whose_group_does_not_end_ends_its_process(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(code: int) -> None:
        events.append(f"left with {code}")
        raise Ended

    monkeypatch.setattr(TensorParallelGroup, "close", lambda _: False)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Ended):
        main.run_rank(0, EngineConfig(model="none", device="cpu"), "")
    assert events[:2] == ["told RuntimeError: out of memory", "left with 1"]


def test_a_group_that_hangs_is_left_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(tensor_parallel.dist, "destroy_process_group", released.wait)
    monkeypatch.setattr(tensor_parallel, "_CLOSE_TIMEOUT_S", 0.05)
    group = TensorParallelGroup(
        rank=0, world_size=2, device=torch.device("cpu"), process_group=object()
    )
    started = time.monotonic()
    try:
        assert not group.close()
    finally:
        released.set()
    assert time.monotonic() - started < 10.0
    assert group.close(), "twice"
