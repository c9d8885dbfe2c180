"""Whose a request is: whom its service is charged to, and with whom it shares a prefix cache."""

from __future__ import annotations

import hashlib
from typing import Literal

from starlette.requests import Request

Owner = Literal["none", "key", "user"]


def tenant_of(request: Request, user: str | None, by: Owner) -> str:
    """A short name for the API key, or for the key and the request's `user`; empty for no matter.

    It is a digest: keys are not to travel to workers, nor to appear in logs.
    """
    if by == "none":
        return ""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    parts = [key.strip() if scheme.lower() == "bearer" else ""]
    if by == "user":
        parts.append(user or "")
    # Lengths keep ("ab", "c") and ("a", "bc") apart.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
