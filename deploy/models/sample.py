"""One generated exchange, and the rule that keeps held-out exchanges away from training."""

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
    """Task family, the unit in which accuracy is reported."""
    turns: tuple[Turn, ...]
    keys: tuple[str, ...]
    """Identities of the instance, which must be unseen for the exchange to count as held out.

    If a task can be solved by rule, keys are its content instead of the wording (the operands of a
    sum, the words of a list), so a held-out sum is unseen in every phrasing.
    """

    def is_heldout(self) -> bool:
        """Whether any key of the instance is held out."""
        return any(is_heldout_key(key) for key in self.keys)


def is_heldout_key(key: str) -> bool:
    """Whether ``key`` is in the tenth of all instances that is excluded from training."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0
