"""The kinds of fault, and what each may cost those who are streaming."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Part(Enum):
    """What a process of the fleet is."""

    STEP = "step"
    """Child of rank 0 that computes, on CPU."""
    RANK0 = "rank0"
    RANK = "rank"
    """Any other."""
    FRONT = "front"
    GATEWAY = "gateway"
    HAPROXY = "haproxy"
    GUARD = "guard"
    """Restarts HAProxy; its parent, which restarts the guard, counts as one, too."""
    MANAGER = "manager"
    """Serve's actor that starts guards; HAProxy outlives it."""
    PROXY = "proxy"
    """Serve's own, which takes requests where no gateway is left."""
    CONTROLLER = "controller"
    GCS = "gcs"
    """Ray's control service, which `rayfleet serve` restarts."""
    COMPILER = "compiler"
    """Of grammars, a child of the front."""


class Noticed(Enum):
    """Who finds that something is wrong, which tells how long that may take."""

    AT_ONCE = "at once"
    """A connection ends."""
    BY_SILENCE = "by silence"
    """A gateway hears nothing of a worker."""
    BY_WATCHDOG = "by watchdog"
    """A front has no step of its ranks."""
    WHEN_IT_ENDS = "when it ends"
    """Nobody takes over what the process holds: it is waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of fault."""

    part: Part | None = None
    """Whose process is hit; None where none is."""
    sign: signal.Signals | None = None
    """That it is sent; None for other faults."""
    noticed: Noticed = Noticed.AT_ONCE
    """By whom, at the latest."""
    given_up: bool = False
    """Whether a process that is stopped is to be replaced, rather than waited for."""
    takes_streams: bool = False
    """Whether clients' connections end with the process."""


CUT_CLIENTS: Final = "cut-clients"
CUT_ATTACH: Final = "cut-attach"
MEMORY: Final = "memory"

_IN_FRONT = (Part.GATEWAY, Part.HAPROXY, Part.GUARD)
"""A guard that is killed ends its HAProxy; its parent does not."""


def _kill(part: Part) -> Kind:
    return Kind(part=part, sign=signal.SIGKILL, takes_streams=part in _IN_FRONT)


def _stop(part: Part) -> Kind:
    noticed = Noticed.AT_ONCE
    if part in (Part.STEP, Part.RANK0, Part.RANK):
        noticed = Noticed.BY_WATCHDOG
    elif part is Part.FRONT:
        noticed = Noticed.BY_SILENCE
    elif part in (Part.GATEWAY, Part.HAPROXY):
        noticed = Noticed.WHEN_IT_ENDS
    return Kind(
        part=part,
        sign=signal.SIGSTOP,
        noticed=noticed,
        given_up=noticed is Noticed.BY_WATCHDOG or part in (Part.FRONT, Part.GATEWAY, Part.HAPROXY),
        takes_streams=part in _IN_FRONT,  # where Serve loses patience with it
    )


KINDS: Final[dict[str, Kind]] = {
    **{f"kill-{part.value}": _kill(part) for part in Part},
    **{f"stop-{part.value}": _stop(part) for part in Part},
    CUT_CLIENTS: Kind(),
    CUT_ATTACH: Kind(),
    MEMORY: Kind(),
}

RECOVERY_LIMITS_S: Final[dict[str, float]] = {
    "stop-gateway": 15.0,
    "stop-front": 15.0,
    "stop-haproxy": 5.0,
    "kill-haproxy": 5.0,
    "kill-guard": 10.0,
    "kill-gcs": 10.0,
}
"""Seconds in which the fleet is to be whole again, by kind; on an otherwise idle machine. HAProxy
serves within 2 s of the end of its guard, and throughout that of the guard's parent: then Serve's
manager is replaced, and has to start."""
