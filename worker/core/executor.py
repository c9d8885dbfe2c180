"""Executor interface: what the engine core launches Plans with, and awaits their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from worker.plan.plan import Plan, StepResult
from worker.protocol.messages import EngineInfo
from worker.protocol.retry import RemoteFailure

AwaitResult = Callable[[], StepResult]
"""Waits for the result of one launched step; raises RankFailure if a rank ended instead. Results of
one executor are awaited in the order of the launches, each once."""


class RankFailure(RemoteFailure):
    """A rank of the group ended or diverged from the others; the group must be rebuilt."""


class Executor(ABC):
    """Carries Plans to every rank of one worker group, and results back.

    `launch` returns without waiting for the step; any number of steps up to the overlap depth may
    be in flight.
    """

    max_overlap_depth: int
    """Most steps that are worth launching ahead of the one whose result is awaited. Known once the
    executor has started."""
    overlaps_prompts = False
    """Whether a step may be launched behind one that computes a prompt, too. Known once the
    executor has started."""

    @abstractmethod
    def start(self) -> EngineInfo:
        """Loads the model on every rank and allocates the KV cache. Raises RankFailure."""

    @abstractmethod
    def launch(self, plan: Plan) -> AwaitResult:
        """Sends one Plan to all ranks; returns a call that waits for its result.

        A Plan with masked draws waits for `sample` after its forward pass.
        """

    @abstractmethod
    def drafts(self, seq: int) -> list[list[int]]:
        """Drafts of each masked row of Plan `seq`, launched last, whose masked rows may draft.

        Called once, when no earlier step is in flight and before `sample`.
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
