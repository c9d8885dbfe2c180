"""Whom a request's service is charged to, where the fleet shares it out fairly."""

from __future__ import annotations

import hashlib
from typing import Literal

from starlette.requests import Request

FairBy = Literal["none", "key", "user"]


def tenant_of(request: Request, user: str | None, fair_by: FairBy) -> str:
    """A short name for the API key, or for the key and the request's `user`; empty for no matter.

    It is a digest: keys are not to travel to workers, nor to appear in logs.
    """
    if fair_by == "none":
        return ""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    parts = [key.strip() if scheme.lower() == "bearer" else ""]
    if fair_by == "user":
        parts.append(user or "")
    # Lengths keep ("ab", "c") and ("a", "bc") apart.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
