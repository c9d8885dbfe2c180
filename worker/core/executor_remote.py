"""Executor for CPU, and for block diffusion: every rank's step runs in a separate process.

An eager step that shares the GIL with a busy scheduler thread is 1.5 to 100 times slower
(measured), so the scheduler and rank 0's steps never share a process on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from worker.config import EngineConfig
from worker.core.executor import AwaitResult, Executor
from worker.core.info import begin_salt, build_engine_info, slowest, start_of
from worker.core.ranks import RankGroup
from worker.plan.messages import Drafts, Fetch, PlanMessage, Result, Sample
from worker.plan.plan import Plan, StepResult
from worker.protocol.messages import EngineInfo


class ProcessExecutor(Executor):
    """Sends Plans to rank processes over sockets and receives rank 0's results.

    Args:
        config: the group's engine configuration.
        directory: the group's private folder.
        spawn: ranks to start as child processes; the caller starts the others.
        host: this node's address if the ranks are on several nodes, otherwise empty.
    """

    max_overlap_depth = 1

    def __init__(
        self, config: EngineConfig, directory: str, spawn: Sequence[int], host: str = ""
    ) -> None:
        self._config = config
        self._group = RankGroup(config, directory, range(config.tensor_parallel_size), spawn, host)
        self._is_cuda = False
        self._last_ahead = 0
        """Number of the last Plan if its step may be one round ahead; otherwise 0."""

    def start(self) -> EngineInfo:
        """Waits until all ranks have loaded their shards. All ranks get the same number of KV cache
        pages."""
        salt = begin_salt(self._config)
        hellos = list(self._group.collect_hellos().values())
        info = build_engine_info(self._config, hellos, salt())
        self._is_cuda = hellos[0].device == "cuda"
        self._group.send(start_of(info))
        info.startup |= slowest(self._group.collect_readies())
        return info

    def launch(self, plan: Plan) -> AwaitResult:
        """Sends the Plan; the ranks run it asynchronously."""
        self._group.send(PlanMessage(plan=plan))
        self._last_ahead = plan.seq if self._is_cuda and plan.has_windows else 0
        return partial(self._result, plan.seq)

    def drafts(self, seq: int) -> list[list[int]]:
        """Waits for the drafts of step `seq`, which rank 0 sends before its result."""
        message = self._group.receive()
        assert isinstance(message, Drafts), f"expected drafts, got {message!r}"
        assert message.seq == seq, f"drafts of step {message.seq}, expected {seq}"
        return message.token_ids

    def sample(self, seq: int, masks: bytes) -> None:
        """Sends the masks; the ranks have already started the step."""
        self._group.send(Sample(seq=seq, masks=masks))

    @property
    def death_fds(self) -> list[int]:
        """File descriptors that become readable when a rank exits."""
        return self._group.death_fds

    def raise_on_death(self) -> None:
        """Raises RankFailure if a rank has exited."""
        self._group.raise_on_death()

    def close(self) -> None:
        """Stops all ranks."""
        self._group.close()

    def _result(self, seq: int) -> StepResult:
        """Waits for the result of step `seq`, the oldest in flight."""
        if seq == self._last_ahead:
            self._group.send(Fetch(seq=seq))
            self._last_ahead = 0
        message = self._group.receive()
        assert isinstance(message, Result), f"expected a result, got {message!r}"
        assert message.step.seq == seq, f"result of step {message.step.seq}, expected {seq}"
        return message.step
