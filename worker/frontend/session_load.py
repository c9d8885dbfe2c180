"""SessionLoad: tokens of the KV cache that the live agent sessions of all gateways need."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from worker.protocol.messages import LoadSnapshot, Submit, TokenDelta
from worker.protocol.working_sets import WorkingSets


class SessionLoad:
    """Live sessions of all gateways in one epoch, which are included in every load sent to
    gateways.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sets = WorkingSets()
        self._keys: dict[str, int] = {}
        """Context of each open request that belongs to a session, by request id."""

    def begin(self, submits: Iterable[Submit]) -> None:
        """Adds the sessions of submits sent to rank 0."""
        for submit in submits:
            use = submit.session
            if use is not None:
                for key in use.displaced:
                    self._sets.drop(key)
                self._sets.begin(use)
                # A request that is resumed here is only counted once.
                self._sets.leave(self._keys.pop(submit.request_id, 0))
                self._keys[submit.request_id] = use.key

    def apply(self, deltas: Mapping[str, Sequence[TokenDelta]]) -> None:
        """Ends requests that have finished in a step, given the deltas of each gateway."""
        if self._keys:
            for changes in deltas.values():
                for delta in changes:
                    if delta.finish_reason is not None:
                        self.end(delta.request_id)

    def end(self, request_id: str) -> None:
        """Ends a request; its session stays live for a while. Idempotent."""
        key = self._keys.pop(request_id, None)
        if key is not None:
            self._sets.end(key, self._clock())

    def added_to(self, load: LoadSnapshot) -> LoadSnapshot:
        """The load, with `session_tokens` set."""
        if self._sets.tokens or load.session_tokens:
            self._sets.expire(self._clock())
            return msgspec.structs.replace(load, session_tokens=self._sets.tokens)
        return load
