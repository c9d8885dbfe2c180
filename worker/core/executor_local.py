"""Executor for CUDA: rank 0's steps run in the scheduler's process, with asynchronous launches."""

from __future__ import annotations

import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from worker.config import EngineConfig
from worker.core.executor import AwaitResult, Executor, RankFailure
from worker.core.info import begin_salt, build_engine_info, slowest, start_of
from worker.core.ranks import LAST_WORD_MS, RankGroup
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.plan.messages import PlanMessage, Sample
from worker.plan.plan import Plan
from worker.protocol.messages import EngineInfo
from worker.rank.memory import await_free_memory
from worker.rank.rank import Rank, select_device


class LocalExecutor(Executor):
    """Runs rank 0's part of each Plan itself, and sends Plans to the other ranks over sockets.

    Args:
        config: the group's engine configuration.
        directory: the group's private folder.
        spawn: ranks to start as child processes (not rank 0); the caller starts the others.
        host: this node's address if the ranks are on several nodes, otherwise empty.
    """

    def __init__(
        self, config: EngineConfig, directory: str, spawn: Sequence[int], host: str = ""
    ) -> None:
        self.max_overlap_depth = 1
        self._config = config
        others = range(1, config.tensor_parallel_size)
        self._others = RankGroup(config, directory, others, spawn, host)
        self._directory = directory
        self._rank = Rank(config)

    def start(self) -> EngineInfo:
        """Loads rank 0's shard while the other ranks load theirs. All ranks get the same number of
        KV cache pages."""
        salt = begin_salt(self._config)
        with self._naming_failed_peer():
            device = select_device(self._config, 0)
            self.overlaps_prompts = device.type == "cuda"
            await_free_memory(device, self._config.cache.gpu_memory_utilization)
            group = TensorParallelGroup.create(
                0,
                self._config.tensor_parallel_size,
                device,
                self._directory,
                while_waiting=self._others.raise_on_death,
                rendezvous=self._others.rendezvous_of_rank_0(),
            )
            hellos = [self._rank.load(group), *self._others.collect_hellos().values()]
        info = build_engine_info(self._config, hellos, salt())
        if info.block_size > 1:
            self.max_overlap_depth = 0  # `launch` blocks until all rounds are done
        start = start_of(info)
        self._others.send(start)
        with self._naming_failed_peer():
            readies = [self._rank.allocate(start), *self._others.collect_readies()]
        info.startup |= slowest(readies)
        return info

    def launch(self, plan: Plan) -> AwaitResult:
        """Sends the Plan to the other ranks, and launches the part of the step that needs
        no masks."""
        self._others.send(PlanMessage(plan=plan))
        with self._naming_failed_peer():
            return self._naming_failed_peer()(self._rank.launch(plan).result)

    def drafts(self, seq: int) -> list[list[int]]:
        """Returns rank 0's drafts for the step that waits for masks."""
        return self._rank.drafts(seq)

    def sample(self, seq: int, masks: bytes) -> None:
        """Sends the masks to the other ranks and launches the rest of the step."""
        self._others.send(Sample(seq=seq, masks=masks))
        with self._naming_failed_peer():
            self._rank.sample(seq, masks)

    @property
    def death_fds(self) -> list[int]:
        """File descriptors that become readable when another rank exits."""
        return self._others.death_fds

    def raise_on_death(self) -> None:
        """Raises RankFailure if another rank has exited."""
        self._others.raise_on_death()

    @contextmanager
    def _naming_failed_peer(self) -> Iterator[None]:
        """Converts a failed collective to a RankFailure that names the rank whose exit caused it.

        Usable as a context manager, or as a decorator for deferred calls.
        """
        try:
            yield
        except RankFailure:
            raise
        except RuntimeError:
            # A peer's exit may be detected shortly after its connection was closed.
            select.select(self.death_fds, [], [], LAST_WORD_MS / 1e3)
            self.raise_on_death()
            raise

    def close(self) -> None:
        """Stops all ranks and frees device memory."""
        # NCCL needs all ranks to leave a group together. The others are stopped first, and killed
        # after a timeout.
        self._others.stop()
        self._rank.close()
        self._others.close()
        torch.cuda.empty_cache()  # no-op without CUDA
