"""Submits in flight: sent to rank 0, but not included in its last reported load."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from worker.protocol.blocks import TOKEN_BYTES
from worker.protocol.messages import LoadSnapshot, Submit


class _SentSubmit(NamedTuple):
    ordinal: int
    num_tokens: int


class InFlightSubmits:
    """Submits of all gateways in one epoch that were sent to rank 0, but are not included in its
    last reported load.

    Every load sent to gateways includes them, so that each gateway immediately takes the requests
    of the others into account.
    """

    def __init__(self) -> None:
        self.submits: deque[_SentSubmit] = deque()
        """Submits not included in the last load passed to `added_to`, oldest first."""
        self._num_tokens = 0
        self._last_ordinal = 0

    def add(self, submits: list[Submit], last_ordinal: int) -> None:
        """Adds a batch whose last submit has ordinal `last_ordinal`; the others have the ordinals
        before it."""
        first = last_ordinal - len(submits) + 1
        for ordinal, submit in enumerate(submits, first):
            num_tokens = len(submit.prompt) // TOKEN_BYTES - submit.num_expected_cached
            self.submits.append(_SentSubmit(ordinal, max(num_tokens, 0)))
            self._num_tokens += self.submits[-1].num_tokens
        self._last_ordinal = max(self._last_ordinal, last_ordinal)

    def added_to(self, load: LoadSnapshot) -> LoadSnapshot:
        """The load, with the submits that it does not include yet counted as reserved."""
        while self.submits and self.submits[0].ordinal <= load.num_submits_seen:
            self._num_tokens -= self.submits.popleft().num_tokens
        return msgspec.structs.replace(
            load,
            num_reserved=len(self.submits),
            reserved_prefill_tokens=self._num_tokens,
            num_submits_reserved=self._last_ordinal,
        )
