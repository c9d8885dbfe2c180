"""Submits in flight: handed to rank 0, but not included in any load that it has reported."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from worker.protocol.blocks import TOKEN_BYTES
from worker.protocol.messages import LoadSnapshot, Submit


class _Handed(NamedTuple):
    ordinal: int
    num_tokens: int


class InFlightSubmits:
    """Submits of all gateways between the frontend and rank 0, in one epoch.

    Every load that is sent to gateways includes them, so that each sees at once what the others
    have sent.
    """

    def __init__(self) -> None:
        self._handed: deque[_Handed] = deque()
        self._num_tokens = 0
        self._last_ordinal = 0

    def add(self, submits: list[Submit], last_ordinal: int) -> None:
        """Adds a batch; its last submit has ordinal `last_ordinal`, the others those before it."""
        first = last_ordinal - len(submits) + 1
        for ordinal, submit in enumerate(submits, first):
            num_tokens = len(submit.prompt) // TOKEN_BYTES - submit.num_expected_cached
            self._handed.append(_Handed(ordinal, max(num_tokens, 0)))
            self._num_tokens += self._handed[-1].num_tokens
        self._last_ordinal = max(self._last_ordinal, last_ordinal)

    def added_to(self, load: LoadSnapshot) -> LoadSnapshot:
        """The load with the submits that it does not include as its reserved part."""
        while self._handed and self._handed[0].ordinal <= load.num_submits_seen:
            self._num_tokens -= self._handed.popleft().num_tokens
        return msgspec.structs.replace(
            load,
            num_reserved=len(self._handed),
            reserved_prefill_tokens=self._num_tokens,
            num_submits_reserved=self._last_ordinal,
        )
