"""Worker groups in one process: each rank is a thread with its own device; a fake NCCL connects
them."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from tests.support.cuda.clocks import Clock, World
from tests.support.cuda.tensors import DEVICE
from worker.config import EngineConfig
from worker.core.executor import AwaitResult, Executor
from worker.core.info import build_engine_info
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.plan.messages import Start
from worker.plan.plan import Plan
from worker.protocol.messages import EngineInfo
from worker.rank.rank import Rank

_TIMEOUT_S = 60.0
R = TypeVar("R")


class Meeting:
    """Exchange of tensors and clocks between the ranks' threads."""

    def __init__(self, world: World, size: int) -> None:
        self.world = world
        self.parts: list[tuple[str, torch.Tensor, Clock]] = []
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, rank: int, part: tuple[str, torch.Tensor, Clock]) -> list[Any]:
        """Parts of all ranks, in rank order."""
        self._slots[rank] = part
        self._barrier.wait(_TIMEOUT_S)
        parts = list(self._slots)
        self._barrier.wait(_TIMEOUT_S)
        return parts

    def leave(self) -> None:
        """Makes ranks that wait for this one fail."""
        self._barrier.abort()


class NcclGroup(TensorParallelGroup):
    """Rank of one thread. A collective is a launch that is ordered after the previous launches of
    all ranks."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank=rank, world_size=size, device=DEVICE, process_group=None)
        self._meeting = meeting

    def all_reduce(self, tensor: torch.Tensor, *, fixed_order: bool = False) -> torch.Tensor:
        """Sums in place, in rank order."""

        def reduce(own: torch.Tensor) -> torch.Tensor:
            total, *others = self._exchange("all_reduce", own)
            return own.copy_(sum(others, start=total))

        return self._launch("nccl all_reduce", reduce, tensor)

    def close(self) -> bool:
        """Shuts down the group. NCCL would wait for graphs that contain the group's collectives."""
        world, clocks = self._meeting.world, self._meeting.world.clocks
        for graph in world.graphs:
            if graph.has_collectives and graph.clocks is clocks:
                clocks.find("graph", "its group ends before it")
        return True

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        def gather(own: torch.Tensor) -> list[torch.Tensor]:
            return [part.clone() for part in self._exchange("all_gather", own)]

        return self._launch("nccl all_gather", gather, tensor.contiguous())

    def _gather_into(self, parts: torch.Tensor, own: torch.Tensor) -> None:
        def gather(parts: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
            return parts.copy_(torch.cat(self._exchange("all_gather_into_tensor", own)))

        stand_in = self._meeting.world.stand_in
        stand_in.opaque("nccl all_gather_into_tensor", gather, (parts, own), {})

    def _launch(self, name: str, function: Callable[[torch.Tensor], R], tensor: torch.Tensor) -> R:
        result: R = self._meeting.world.stand_in.opaque(name, function, (tensor,), {})
        return result

    def _exchange(self, kind: str, own: torch.Tensor) -> list[torch.Tensor]:
        clocks = self._meeting.world.clocks
        lane = clocks.current
        if clocks.capture is None:
            lane.join(clocks.host.clock)
            lane.tick()
        called = f"{kind} of {list(own.shape)}"
        parts = self._meeting.exchange(self.rank, (called, own.clone(), lane.clock.copy()))
        for other, (theirs, _, clock) in enumerate(parts):
            if theirs != called:
                raise RuntimeError(f"{called} of rank {self.rank}, {theirs} of rank {other}")
            if clocks.capture is None:
                lane.join(clock)
        return [part for _, part, _ in parts]


class RanksHere(Executor):
    """All ranks in this process. Calls return when all ranks are done."""

    def __init__(self, config: EngineConfig, count: int) -> None:
        self.max_overlap_depth = 1
        self.overlaps_prompts = True
        self._config = config
        self._ranks = [Rank(config) for _ in range(count)]

    @property
    def _rank(self) -> Rank:
        return self._ranks[0]

    @abstractmethod
    def join(self, number: int) -> TensorParallelGroup:
        """The group of one rank."""

    @abstractmethod
    def each(self, work: Callable[[Rank, int], R]) -> list[R]:
        """Results of each rank's work, in rank order."""

    def start(self) -> EngineInfo:
        hellos = self.each(lambda rank, n: rank.load(self.join(n)))
        info = build_engine_info(self._config, hellos, "salt")
        start = Start(num_pages=hellos[0].num_pages, num_host_pages=info.num_host_pages)
        self.each(lambda rank, _: rank.allocate(start))
        return info

    def launch(self, plan: Plan) -> AwaitResult:
        return self.each(lambda rank, _: rank.launch(plan))[0].result

    def drafts(self, seq: int) -> list[list[int]]:
        return self._rank.drafts(seq)

    def sample(self, seq: int, masks: bytes) -> None:
        self.each(lambda rank, _: rank.sample(seq, masks))

    @property
    def death_fds(self) -> list[int]:
        return []

    def raise_on_death(self) -> None:
        pass

    def close(self) -> None:
        self.each(lambda rank, _: rank.close())


class ThreadedExecutor(RanksHere):
    """Runs rank 0 in the caller's thread, and rank 1 in another."""

    def __init__(
        self, world: World, config: EngineConfig, directory: str, spawn: Sequence[int]
    ) -> None:
        super().__init__(config, 2)
        self._world = world
        self._meeting = Meeting(world, 2)
        self._pool = ThreadPoolExecutor(1)
        self._has_ended = False
        self._device = world.rank()
        self._pool.submit(self._device.__enter__).result()

    def join(self, number: int) -> TensorParallelGroup:
        return NcclGroup(number, 2, self._meeting)

    def each(self, work: Callable[[Rank, int], R]) -> list[R]:
        other = self._pool.submit(work, self._ranks[1], 1)
        try:
            own = work(self._ranks[0], 0)
        except BaseException:
            self._meeting.leave()
            other.exception(_TIMEOUT_S)
            self._end()
            raise
        return [own, other.result(_TIMEOUT_S)]

    def close(self) -> None:
        if self._has_ended:  # one of them failed
            return
        # Ranks other than 0 need not wait for their last steps, because nothing is allocated after
        # them.
        self._world.is_over = True
        super().close()
        self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._pool.submit(self._device.__exit__, None, None, None).result()
        self._pool.shutdown()
