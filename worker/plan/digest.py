"""A running digest of all sampled tokens, by which ranks notice that one fell out of step."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

_KEEP = 512
"""Values kept: far more steps than a digest can lag behind."""


class SampleDigest:
    """Hashes (step, sampled tokens) of every step into one number; every rank keeps its own."""

    def __init__(self) -> None:
        self._values: OrderedDict[int, int] = OrderedDict({0: 0})
        self._last = 0

    def update(self, seq: int, token_ids: Sequence[int]) -> None:
        """Adds the tokens that step `seq` drew, in the order of its rows. Steps come in order."""
        assert seq > self._last, f"step {seq} after step {self._last}"
        data = array("q", (seq, *token_ids)).tobytes()
        self._values[seq] = xxh3_64_intdigest(data, self._values[self._last])
        self._last = seq
        if len(self._values) > _KEEP:
            self._values.popitem(last=False)

    def value(self, seq: int) -> int:
        """Digest of all steps up to `seq`, as a signed 64-bit number.

        Raises:
            KeyError: step `seq` was not added, or is hundreds of steps old.
        """
        value = self._values[seq]
        return value - 2**64 if value >= 2**63 else value
