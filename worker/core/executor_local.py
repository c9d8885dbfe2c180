"""Executor for CUDA: rank 0's step runs in the scheduler's process, where launches do not wait."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from worker.config import EngineConfig
from worker.core.executor import Executor, RankFailure, StepFuture
from worker.core.info import build_engine_info, slowest
from worker.core.ranks import LAST_WORD_MS, RankGroup
from worker.models.tensor_parallel import TensorParallelGroup
from worker.plan.messages import PlanMessage, Sample, Start
from worker.plan.plan import Plan, StepResult
from worker.rank.device import select_device
from worker.rank.runner import ModelRunner
from worker.rank.startup import RankStartup
from worker.rank.steps import ForwardStep, SampledStep
from worker.wire.messages import EngineInfo


class LocalExecutor(Executor):
    """Runs rank 0's share of each Plan itself, and sends Plans to the other ranks over ipc.

    Args:
        config: the group's engine configuration.
        directory: the group's private folder.
        spawn: ranks from 1 on to start as child processes; the caller starts the others.
        host: this node's address where those are on several nodes.
    """

    def __init__(
        self, config: EngineConfig, directory: str, spawn: Sequence[int], host: str = ""
    ) -> None:
        self.max_overlap_depth = 1
        self._config = config
        others = range(1, config.tensor_parallel_size)
        self._others = RankGroup(config, directory, others, spawn, host)
        self._directory = directory
        self._runner: ModelRunner | None = None
        self._group: TensorParallelGroup | None = None
        self._awaiting: tuple[_LocalStep, ForwardStep] | None = None
        """The step that has been launched but waits for masks."""

    def start(self) -> EngineInfo:
        """Loads rank 0's shard beside the other ranks', allocates equally many pages on all."""
        device = select_device(self._config, 0)
        startup = RankStartup(self._config)
        with self._blaming_peers():
            self._group = TensorParallelGroup.create(
                *(0, self._config.tensor_parallel_size, device, self._directory),
                while_waiting=self._others.raise_on_death,
                rendezvous=self._others.rendezvous_of_rank_0(),
            )
            self._runner = startup.load(self._group)
            hellos = [startup.hello(self._runner), *self._others.collect_hellos().values()]
        info = build_engine_info(self._config, hellos)
        if info.block_size > 1:
            self.max_overlap_depth = 0  # `launch` waits for the rounds of its blocks
        num_pages = min(hello.num_pages for hello in hellos)
        start = Start(num_pages=num_pages, num_host_pages=info.num_host_pages)
        self._others.send(start)
        with self._blaming_peers():
            readies = [startup.allocate(self._runner, start), *self._others.collect_readies()]
        info.startup |= slowest(readies)
        return info

    def launch(self, plan: Plan) -> StepFuture:
        """Sends the Plan to the other ranks; launches it here as far as it goes without masks."""
        assert self._runner is not None, "launch before start"
        assert self._awaiting is None, "a Plan before the masks of the one before"
        self._others.send(PlanMessage(plan=plan))
        step = _LocalStep(plan.seq, self._blaming_peers)
        with self._blaming_peers():
            forwarded = self._runner.forward(plan)
            if plan.masked:
                self._awaiting = step, forwarded
            else:
                step.sampled = self._runner.sample(forwarded)
        return step

    def drafts(self, seq: int) -> list[list[int]]:
        """What rank 0 has drafted for the step that waits for masks."""
        assert self._awaiting is not None, "no Plan waits for masks"
        step, forwarded = self._awaiting
        assert step.seq == seq, f"drafts of step {seq}, {step.seq} waits"
        return forwarded.masked_drafts()

    def sample(self, seq: int, masks: bytes) -> None:
        """Sends the masks to the other ranks and launches the rest of the step here."""
        assert self._runner is not None, "masks before start"
        assert self._awaiting is not None, "no Plan waits for masks"
        (step, forwarded), self._awaiting = self._awaiting, None
        assert step.seq == seq, f"masks of step {seq} for step {step.seq}"
        self._others.send(Sample(seq=seq, masks=masks))
        with self._blaming_peers():
            step.sampled = self._runner.sample(forwarded, masks)

    @property
    def death_fds(self) -> list[int]:
        """Descriptors that turn readable when a child process ends."""
        return self._others.death_fds

    def raise_on_death(self) -> None:
        """Raises RankFailure if another rank has ended."""
        self._others.raise_on_death()

    @contextmanager
    def _blaming_peers(self) -> Iterator[None]:
        """Raises RankFailure, with who ended, where a collective failed for lack of a peer."""
        try:
            yield
        except RankFailure:
            raise
        except RuntimeError:
            # The end of a peer's process may be seen a moment after that of its connection.
            select.select(self.death_fds, [], [], LAST_WORD_MS / 1e3)
            self.raise_on_death()
            raise

    def close(self) -> None:
        """Ends all ranks."""
        self._others.close()
        self._runner = None
        if self._group is not None:
            self._group.close()
            if self._group.device.type == "cuda":
                # Back to the device, for whatever this process loads next.
                torch.cuda.empty_cache()
            self._group = None


class _LocalStep:
    """A step in flight on this process's device."""

    def __init__(self, seq: int, blaming: Callable[[], AbstractContextManager[None]]) -> None:
        self._seq = seq
        self._blaming = blaming
        self.sampled: SampledStep | None = None
        """None until it has its masks."""

    @property
    def seq(self) -> int:
        return self._seq

    def result(self) -> StepResult:
        assert self.sampled is not None, f"step {self._seq} still waits for masks"
        with self._blaming():
            return self.sampled.result()
