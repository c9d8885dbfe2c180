"""Whose a request is: whom its service is charged to, and with whom it shares a prefix cache."""

from __future__ import annotations

import hashlib
from typing import Literal

from router.api.account import Account

Owner = Literal["auto", "none", "key", "user"]


def tenant_of(account: Account, user: str | None, by: Owner) -> str:
    """A short name for the API key, or for the key and the request's `user`; empty for no matter.

    Keys are not to travel to workers, nor to appear in logs: it is the name that the key was given,
    or a digest.

    Args:
        account: of the request.
        user: the field of that name.
        by: auto is key where there are several of them.
    """
    if by == "none" or (by == "auto" and account.num_keys < 2):
        return ""
    if by != "user":
        return account.name
    # Lengths keep ("ab", "c") and ("a", "bc") apart.
    text = "".join(f"{len(part)}:{part}" for part in (account.name, user or ""))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
