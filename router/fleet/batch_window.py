"""BatchWindow: places requests that arrive in the same event loop iteration together."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import NamedTuple

from router.fleet.blocks import PromptBlocks
from router.fleet.fleet import Choice, Fleet


class _Waiting(NamedTuple):
    request_id: str
    prompt: PromptBlocks
    excluded: Collection[str]
    answer: asyncio.Future[Choice | None]


class BatchWindow:
    """Collects requests until the event loop's next iteration, which starts immediately if it is
    idle.

    Args:
        fleet: the fleet to place them in.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._waiting: list[_Waiting] = []

    async def place(
        self, request_id: str, prompt: PromptBlocks, excluded: Collection[str] = ()
    ) -> Choice | None:
        """`Fleet.reserve`, together with other requests that arrive meanwhile."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Choice | None] = loop.create_future()
        if not self._waiting:
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
        waiting = [request for request in self._waiting if not request.answer.done()]
        self._waiting.clear()
        try:
            choices = self._fleet.reserve_group([request[:3] for request in waiting])
        except Exception as error:
            for request in waiting:
                request.answer.set_exception(error)
            return
        for request, choice in zip(waiting, choices, strict=True):
            request.answer.set_result(choice)
