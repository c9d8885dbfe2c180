"""Grammars that can never be used, as a worker has found."""

from __future__ import annotations

from collections import OrderedDict

from worker.wire.structured import StructuredOutputsParams

MAX_GRAMMARS = 1024
"""Messages have 1 KiB at most (worker.core.grammar.base), so all of them 1 MiB."""


class RefusedGrammars:
    """Remembers what workers have refused for good, until a worker joins that may know better.

    Whoever sends such a grammar again gets the message before anything is booked, and costs no
    worker anything. Grammars are kept by their hashes: their texts may be large.
    """

    def __init__(self) -> None:
        self._messages: OrderedDict[int, str] = OrderedDict()

    def add(self, params: StructuredOutputsParams, message: str) -> None:
        """A worker refuses it, and would refuse it again."""
        self._messages[hash(params)] = message
        if len(self._messages) > MAX_GRAMMARS:
            self._messages.popitem(last=False)

    def find(self, params: StructuredOutputsParams | None) -> str | None:
        """Why it was refused; None where nothing is known against it."""
        if params is None or not self._messages:
            return None
        return self._messages.get(hash(params))

    def clear(self) -> None:
        """A worker has come, perhaps with another backend or vocabulary."""
        self._messages.clear()
