"""Shutdown of a rank: its failure is reported first, its graphs are freed before its group, nothing
hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.support.checkpoints.dense import write_checkpoint
from worker.config import EngineConfig
from worker.core import executor_local
from worker.core.executor_local import LocalExecutor
from worker.core.ranks import RankGroup
from worker.models.layers import tensor_parallel
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.plan.messages import Failure, Start, Stop
from worker.plan.plan import Plan
from worker.protocol.retry import may_heal
from worker.rank import main, memory
from worker.rank.memory import await_free_memory
from worker.rank.rank import Rank
from worker.rank.runner import ModelRunner


class Ended(BaseException):
    pass


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Actions of a rank that fails while loading, in order; its group shuts down immediately."""
    found: list[str] = []

    class Channel:
        def __init__(self, *_: Any) -> None:
            pass

        def send(self, message: Any) -> None:
            assert isinstance(message, Failure)
            found.append(f"reported {message.error.splitlines()[-1]}")

        def close(self) -> None:
            found.append("channel closed")

    def fail(rank: Rank, group: TensorParallelGroup) -> None:
        rank._group = group
        raise RuntimeError("out of memory")

    def end(_: TensorParallelGroup) -> bool:
        found.append("group ended")
        return True

    # This process runs other tests.
    monkeypatch.setattr(main, "yield_cpu_to_others", lambda added: None)
    monkeypatch.setattr(main, "RankChannel", Channel)
    monkeypatch.setattr(Rank, "load", fail)
    monkeypatch.setattr(TensorParallelGroup, "close", end)
    return found


def test_a_failure_is_reported_before_the_group_ends(events: list[str]) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        main.run_rank(0, EngineConfig.of(model="none", device="cpu"), "")
    assert events == ["reported RuntimeError: out of memory", "group ended", "channel closed"]


def test_a_rank_whose_group_does_not_end_ends_its_process(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(code: int) -> None:
        events.append(f"left with {code}")
        raise Ended

    monkeypatch.setattr(TensorParallelGroup, "close", lambda _: False)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Ended):
        main.run_rank(0, EngineConfig.of(model="none", device="cpu"), "")
    assert events[:2] == ["reported RuntimeError: out of memory", "left with 1"]


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


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize(
    ("step", "remedy"),
    [
        ("__init__", "for the weights: raise --tensor-parallel-size"),
        ("hello", "for the largest step: lower --max-num-batched-tokens"),
        ("allocate", "for KV cache and CUDA graphs: lower --gpu-memory-utilization"),
        ("forward", "for a step: lower --gpu-memory-utilization"),
        ("sample", "for sampling: lower --gpu-memory-utilization"),
    ],
)
def test_out_of_memory_is_reported_with_a_remedy(
    tmp_path: Path, step: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retriable: memory of a dead rank may not have been freed yet."""
    monkeypatch.setattr(ModelRunner, step, out_of_memory)
    write_checkpoint("qwen3", tmp_path)
    rank = Rank(
        EngineConfig.of(model=str(tmp_path), device="cpu", cpu_threads=1, kv_cache_tokens=64)
    )

    def start() -> None:
        rank.load(TensorParallelGroup.alone(torch.device("cpu")))
        rank.allocate(Start(num_pages=5))
        rank.launch(Plan(1, [], [], []))

    with pytest.raises(RuntimeError, match=f"Tried to allocate(?s:.*){remedy}") as raised:
        start()
    assert may_heal(raised.value)


class Device:
    """A device whose memory is freed over time; `sleep` advances time."""

    def __init__(self, patch: pytest.MonkeyPatch, free: dict[float, int]) -> None:
        self.now, self._free = 0.0, free
        patch.setattr(torch.cuda, "mem_get_info", self.mem_get_info)

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        moment = max(moment for moment in self._free if moment <= self.now)
        return self._free[moment] << 30, 80 << 30

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("free", "least", "most"),
    [
        ({0.0: 79}, 0.0, 0.0),  # no other process
        ({0.0: 10, 1.5: 40, 4.0: 79}, 4.0, 4.2),  # a dead rank's
        ({0.0: 30}, 2.9, 3.2),  # others', which remain
        ({float(second): second // 2 for second in range(200)}, 59.0, 61.0),
    ],
    ids=["free", "comes back", "others", "for ever"],
)
def test_a_new_group_waits_for_the_memory_of_the_one_before(
    free: dict[float, int],
    least: float,
    most: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    device = Device(monkeypatch, free)
    await_free_memory(torch.device("cuda", 0), 0.9, clock=lambda: device.now, sleep=device.sleep)
    assert least <= device.now <= most
    assert len(caplog.messages) == (2 if most else 0)


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Actions of a rank before it joins the others, in order; it never does."""
    found: list[str] = []

    def meet(*_: Any, **__: Any) -> None:
        found.append("met")
        raise Ended

    def wait(device: torch.device, utilization: float) -> None:
        found.append(f"waited for {utilization:g} of {device.type}")

    monkeypatch.setattr(TensorParallelGroup, "create", meet)
    monkeypatch.setattr(memory, "await_free_memory", wait)
    monkeypatch.setattr(executor_local, "await_free_memory", wait)
    return found


@pytest.mark.usefixtures("events")
def test_a_rank_waits_for_memory_before_it_meets_the_others(meetings: list[str]) -> None:
    with pytest.raises(Ended):
        main.run_rank(
            0, EngineConfig.of(model="none", device="cpu", gpu_memory_utilization=0.5), ""
        )
    assert meetings == ["waited for 0.5 of cpu", "met"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_so_does_rank_0_beside_its_scheduler(
    kind: str, meetings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also launches after prompts, if the device is not shared."""
    monkeypatch.setattr(executor_local, "select_device", lambda *_: torch.device(kind))
    monkeypatch.setattr(executor_local, "begin_salt", lambda _: lambda: "salt")
    config = EngineConfig.of(model="none", gpu_memory_utilization=0.5)
    executor = LocalExecutor(config, str(tmp_path), [])
    try:
        with pytest.raises(Ended):
            executor.start()
    finally:
        executor.close()
    assert meetings == [f"waited for 0.5 of {kind}", "met"]
    assert executor.max_overlap_depth == 1
    assert executor.overlaps_prompts == (kind == "cuda")


class Noted:
    """Records its calls."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name, self._events = name, events

    def __getattr__(self, method: str) -> Callable[[], None]:
        return lambda: self._events.append(f"{self._name} {method}")


def test_an_executor_leaves_its_group_beside_the_other_ranks(tmp_path: Path) -> None:
    """NCCL shuts down a group once all ranks leave: none may be killed before."""
    executor = LocalExecutor(EngineConfig.of(model="none", device="cpu"), str(tmp_path), [])
    executor._others.close()
    events = list[str]()
    executor._others = cast("RankGroup", Noted("others", events))
    executor._rank = cast("Rank", Noted("rank", events))
    executor.close()
    assert events == ["others stop", "rank close", "others close"]


def test_ranks_are_shut_down_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[object]()
    group = RankGroup(EngineConfig.of(model="none", device="cpu"), str(tmp_path), [1], [])
    monkeypatch.setattr(group, "send", sent.append)
    for end in (group.stop, group.close, group.close):
        end()
    assert sent == [Stop()]
