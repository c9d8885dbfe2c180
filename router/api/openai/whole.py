"""WholeWriter: responses that are not streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence


class WholeWriter(ABC):
    """Writes the JSON body of a generation that has ended."""

    headers: Sequence[tuple[bytes, bytes]] = ()
    """Additional headers of the response."""

    @abstractmethod
    def whole(self) -> Iterator[bytes]:
        """JSON of the response, in slices of about a millisecond each."""
