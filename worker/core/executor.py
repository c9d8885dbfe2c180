"""The seam between deciding steps and executing them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from worker.plan.plan import Plan, StepResult
from worker.wire.messages import EngineInfo
from worker.wire.retry import RemoteFailure

AwaitResult = Callable[[], StepResult]
"""Of a launched step: blocks until it has completed, and raises RankFailure if a rank ended
instead. Steps of one executor are asked for in the order of their launches, each once."""


class RankFailure(RemoteFailure):
    """A rank of the group ended or fell out of step; the group must be rebuilt."""


class Executor(ABC):
    """Carries Plans to every rank of one worker group, and results back.

    `launch` returns without waiting for the step; any number of steps up to the overlap depth may
    be in flight.
    """

    max_overlap_depth: int
    """How many steps may usefully be launched ahead of the one whose results are awaited. Known
    once it has started."""
    overlaps_prompts = False
    """Whether a step is launched ahead behind one with a prompt, too. Known once it has started."""

    @abstractmethod
    def start(self) -> EngineInfo:
        """Loads the model on every rank and allocates the KV cache. Raises RankFailure."""

    @abstractmethod
    def launch(self, plan: Plan) -> AwaitResult:
        """Sends one Plan to all ranks; returns what waits for its result. One with masked draws
        waits for `sample` when it went forward."""

    @abstractmethod
    def drafts(self, seq: int) -> list[list[int]]:
        """Drafts of each masked row of the Plan launched last, where it may have any.

        Asked for once, when no earlier step is in flight and before `sample`.
        """

    @abstractmethod
    def sample(self, seq: int, masks: bytes) -> None:
        """Sends the masks that the Plan launched last, step `seq`, waits for.

        Args:
            seq: number of the Plan; it has masked draws.
            masks: int32 words for each draw of `Plan.masked`, see `worker.plan.messages`.
        """

    @property
    @abstractmethod
    def death_fds(self) -> list[int]:
        """Descriptors that turn readable when a rank's process ends; polled while idle."""

    @abstractmethod
    def raise_on_death(self) -> None:
        """Raises RankFailure if a rank's process has ended."""

    @abstractmethod
    def close(self) -> None:
        """Ends all ranks and frees what they hold. Safe to call twice."""
