"""One generated exchange, and the rule that excludes held-out exchanges from training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

HELDOUT_ONE_IN = 10


class Turn(NamedTuple):
    """A user message and the assistant's answer."""

    user: str
    assistant: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A self-contained exchange of one or more turns."""

    family: str
    """Task family; accuracy is reported per family."""
    turns: tuple[Turn, ...]
    keys: tuple[str, ...]
    """Identities of the exchange, which is held out if any of them is (see `is_heldout_key`).

    If a task follows a rule, its keys are the content instead of the wording (the operands of a
    sum, the words of a list), so that a held-out sum is unseen in every phrasing.
    """

    def is_heldout(self) -> bool:
        """Whether the exchange is excluded from training: whether any of its keys is held out."""
        return any(is_heldout_key(key) for key in self.keys)


def is_heldout_key(key: str) -> bool:
    """Whether ``key`` is among the 10 % of all keys that are excluded from training."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0
