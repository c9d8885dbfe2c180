"""One generated exchange, and the rule that keeps held-out exchanges away from training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

HELDOUT_ONE_IN = 10


class Turn(NamedTuple):
    """What the user says and what the assistant answers."""

    user: str
    assistant: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A self-contained exchange of one or more turns."""

    family: str
    """Task family, the unit in which accuracy is reported."""
    turns: tuple[Turn, ...]
    keys: tuple[str, ...]
    """Identities of the instance: what must be unseen for the exchange to count as held out.

    Keys name the substance rather than the wording wherever the task can be solved by rule (the
    operands of a sum, the words of a list), so a held-out sum is unseen in every phrasing.
    """

    def is_heldout(self) -> bool:
        """Whether any identity of the instance falls into the held-out bucket."""
        return any(is_heldout_key(key) for key in self.keys)


def is_heldout_key(key: str) -> bool:
    """Whether ``key`` belongs to the tenth of all instances that training never sees."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0
