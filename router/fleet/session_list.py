"""SessionList: a gateway's waiting and live agent sessions, for the page and `rayfleet top`."""

from __future__ import annotations

from typing import Literal

import msgspec
from xxhash import xxh3_64_hexdigest

from router.fleet.sessions import Context

State = Literal["waiting", "running", "idle"]
"""State of a context: waiting at the gate, running (has requests in flight), or idle (live, without
requests in flight).
"""
_DIGEST_CHARS = 8


class ListedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A context of a session, without its prompt and the client's session id."""

    key: int
    """Id of the context; see SessionUse."""
    session: str
    """Digest of the client's session id or, if there is none, of the context's id. Sub-agents have
    the digest of their session."""
    state: State
    state_s: float
    """Seconds that the context has been waiting or idle; 0 while it is running."""
    age_s: float
    """Seconds since the session started."""
    worker: str
    """Worker of the last request; empty before the first."""
    tokens: int
    """Tokens of the last prompt: the context's working set, including shared prefixes."""
    turns: int
    """Number of requests sent to workers so far."""


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions of a model on one gateway."""

    num_waiting: int = 0
    """Number of waiting contexts, including those that are not listed."""
    num_live: int = 0
    """Number of live contexts, including those that are not listed."""
    sessions: tuple[ListedSession, ...] = ()
    """Waiting contexts in the order of admission, then live ones, the largest first."""


def listed(context: Context, state: State, state_s: float, now: float) -> ListedSession:
    """The list entry of a context."""
    name = context.session.name or str(context.key)
    return ListedSession(
        key=context.key,
        session=xxh3_64_hexdigest(name.encode())[:_DIGEST_CHARS],
        state=state,
        state_s=state_s,
        age_s=max(now - context.born, 0.0),
        worker=context.home,
        tokens=context.num_tokens,
        turns=context.num_turns,
    )
