"""Executor interface: launches the engine core's Plans and awaits their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from worker.plan.plan import Plan, StepResult
from worker.protocol.messages import EngineInfo
from worker.protocol.retry import RemoteFailure

AwaitResult = Callable[[], StepResult]
"""Waits for the result of a launched step; raises RankFailure if a rank exited instead. Each result
must be awaited once, in launch order."""


class RankFailure(RemoteFailure):
    """A rank of the group exited or diverged from the others; the group must be rebuilt."""


class Executor(ABC):
    """Sends Plans to every rank of a worker group and returns results.

    `launch` returns without waiting for the step; several steps may be in flight, up to the overlap
    depth.
    """

    max_overlap_depth: int
    """Maximum number of steps that are worth launching ahead of the one whose result is awaited.
    Set by `start`."""
    overlaps_prompts = False
    """Whether steps may also be launched ahead of a prefill step's result. Set by `start`."""

    @abstractmethod
    def start(self) -> EngineInfo:
        """Loads the model on all ranks and allocates the KV cache. Raises RankFailure if a rank
        fails."""

    @abstractmethod
    def launch(self, plan: Plan) -> AwaitResult:
        """Sends a Plan to all ranks; returns a function that waits for its result.

        A Plan with masked rows waits for `sample` after its forward pass.
        """

    @abstractmethod
    def drafts(self, seq: int) -> list[list[int]]:
        """Returns the drafts of each masked row of Plan `seq`, the last launched one.

        Must be called once, before `sample` and while no earlier step is in flight.
        """

    @abstractmethod
    def sample(self, seq: int, masks: bytes) -> None:
        """Sends the grammar masks that the last launched Plan, step `seq`, waits for.

        Args:
            seq: number of the Plan; it has masked rows.
            masks: int32 words for each row of `Plan.masked` (see `worker.plan.messages`).
        """

    @property
    @abstractmethod
    def death_fds(self) -> list[int]:
        """File descriptors that become readable when a rank's process exits; polled while idle."""

    @abstractmethod
    def raise_on_death(self) -> None:
        """Raises RankFailure if a rank's process has exited."""

    @abstractmethod
    def close(self) -> None:
        """Stops all ranks and frees their resources. Idempotent."""
