"""BatchWindow: places requests that arrive in the same event loop iteration together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from router.fleet.blocks import PromptBlocks
from router.fleet.fleet import Choice, Fleet
from router.work_slice import SLICE_S


class _Waiting(NamedTuple):
    request_id: str
    prompt: PromptBlocks
    excluded: Collection[str]
    answer: asyncio.Future[Choice | None]


class BatchWindow:
    """Collects requests until the event loop's next iteration, which starts immediately if it is
    idle.

    Requests that arrive while a batch is being placed form the next batch.

    Args:
        fleet: the fleet that places the requests.
        clock: time in seconds.
    """

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.perf_counter) -> None:
        self._fleet = fleet
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._batch: list[_Waiting] = []
        self._choices: Iterator[tuple[int, Choice | None]] | None = None
        """Remaining choices for the requests in `_batch`; None if no batch is being placed."""

    async def place(
        self, request_id: str, prompt: PromptBlocks, excluded: Collection[str] = ()
    ) -> Choice | None:
        """`Fleet.reserve`, batched with other requests that arrive at about the same time."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Choice | None] = loop.create_future()
        if not self._waiting and self._choices is None:
            loop.call_soon(self._place)
        self._waiting.append(_Waiting(request_id, prompt, excluded, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            # The request may have been placed in the iteration in which its client disconnected.
            if answer.done() and not answer.cancelled() and (choice := answer.result()):
                self._fleet.release_booking(choice.worker_id, request_id)
            raise

    def _place(self) -> None:
        """Places requests for up to SLICE_S, and continues in the next iteration."""
        if self._choices is None:
            self._next_batch()
        assert self._choices is not None
        until = self._clock() + SLICE_S
        try:
            for place, choice in self._choices:
                self._answer(self._batch[place], choice)
                if self._clock() >= until:
                    break
            else:
                self._choices = None
        except Exception as error:
            self._choices = None
            for request in self._batch:
                if not request.answer.done():
                    request.answer.set_exception(error)
        if self._choices is not None or self._waiting:
            asyncio.get_running_loop().call_soon(self._place)

    def _next_batch(self) -> None:
        self._batch = [request for request in self._waiting if not request.answer.done()]
        self._waiting.clear()
        self._choices = self._fleet.reserve_group([request[:3] for request in self._batch])

    def _answer(self, request: _Waiting, choice: Choice | None) -> None:
        if not request.answer.done():
            request.answer.set_result(choice)
        elif choice is not None:  # its client disconnected while others were placed
            self._fleet.release_booking(choice.worker_id, request.request_id)
