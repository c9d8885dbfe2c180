"""Executor for CUDA: rank 0's step runs in the scheduler's process, where launches do not block."""

from __future__ import annotations

import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from worker.engine.base import Executor, RankFailure, StepFuture
from worker.engine.config import EngineConfig
from worker.engine.info import build_engine_info
from worker.engine.runner import ModelRunner, select_device
from worker.parallel.coordinator import LAST_WORD_MS, RankGroup
from worker.parallel.group import TensorParallelGroup
from worker.parallel.messages import PlanMessage
from worker.scheduler.plan import Plan, StepResult
from worker.wire.messages import EngineInfo


class LocalExecutor(Executor):
    """Runs rank 0's share of each Plan itself, and sends Plans to the other ranks over ipc.

    Args:
        config: the group's engine configuration.
        directory: the group's private folder.
        spawn: ranks from 1 on to start as child processes; the caller starts the others.
    """

    max_overlap_depth = 0  # `launch` waits for the step: one ahead would only delay results

    def __init__(self, config: EngineConfig, directory: str, spawn: Sequence[int]) -> None:
        self._config = config
        self._others = RankGroup(config, directory, range(1, config.tensor_parallel_size), spawn)
        self._directory = directory
        self._runner: ModelRunner | None = None
        self._group: TensorParallelGroup | None = None

    def start(self) -> EngineInfo:
        """Loads rank 0's shard beside the other ranks', allocates equally many pages on all."""
        device = select_device(self._config, 0)
        with self._blaming_peers():
            self._group = TensorParallelGroup.create(
                0, self._config.tensor_parallel_size, device, self._directory
            )
            self._runner = ModelRunner(self._config, self._group)
            hellos = [self._runner.hello(), *self._others.collect_hellos().values()]
        info = build_engine_info(self._config, hellos)
        num_pages = min(hello.num_pages for hello in hellos)
        self._runner.allocate(num_pages)
        self._others.start(num_pages)
        return info

    def launch(self, plan: Plan) -> StepFuture:
        """Sends the Plan to the other ranks and runs it here."""
        assert self._runner is not None, "launch before start"
        self._others.send(PlanMessage(plan=plan))
        with self._blaming_peers():
            return _CompletedStep(self._runner.execute(plan))

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


class _CompletedStep:
    """A step whose result is already here."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    @property
    def seq(self) -> int:
        return self._result.seq

    def result(self) -> StepResult:
        return self._result
