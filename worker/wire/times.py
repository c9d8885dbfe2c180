"""How long the parts of a request took."""

from __future__ import annotations

import msgspec


class FirstTokenTimes(msgspec.Struct, array_like=True, frozen=True):
    """Where a request's time at its worker went before its first token, in seconds."""

    queue_s: float
    """Until it was first admitted."""
    prefill_s: float
    """From then to the first token, what interrupted it included."""
