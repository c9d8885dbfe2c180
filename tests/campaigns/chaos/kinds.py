"""Kinds of faults, and the effect that each may have on clients."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Part(Enum):
    """Role of a process in the fleet."""

    STEP = "step"
    """Child process of rank 0 that computes, on CPU."""
    RANK0 = "rank0"
    RANK = "rank"
    """Any other rank."""
    FRONT = "front"
    GATEWAY = "gateway"
    HAPROXY = "haproxy"
    GUARD = "guard"
    """Process that restarts HAProxy. Its parent, which restarts the guard, also counts as a
    guard."""
    MANAGER = "manager"
    """Serve's actor that starts guards; HAProxy survives it."""
    PROXY = "proxy"
    """Serve's own proxy, which accepts requests if there are no gateways left."""
    CONTROLLER = "controller"
    GCS = "gcs"
    """Ray's control service, which `rayfleet serve` restarts."""
    COMPILER = "compiler"
    """Compiles grammars; child process of the frontend."""


class Noticed(Enum):
    """How a fault is detected, which determines how long detection may take."""

    AT_ONCE = "at once"
    """A connection closes."""
    BY_SILENCE = "by silence"
    """A gateway receives no heartbeats from a worker."""
    BY_WATCHDOG = "by watchdog"
    """A frontend receives no step from its ranks."""
    WHEN_IT_ENDS = "when it ends"
    """Not detected: other processes wait for this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of fault."""

    part: Part | None = None
    """Part whose process is hit; None for faults that hit no process."""
    sign: signal.Signals | None = None
    """Signal that is sent; None for other faults."""
    noticed: Noticed = Noticed.AT_ONCE
    """Slowest way in which the fault is detected."""
    given_up: bool = False
    """Whether a stopped process must be replaced."""
    takes_streams: bool = False
    """Whether client connections through the process end with it."""


CUT_CLIENTS: Final = "cut-clients"
CUT_ATTACH: Final = "cut-attach"
MEMORY: Final = "memory"

_IN_FRONT = (Part.GATEWAY, Part.HAPROXY, Part.GUARD)
"""Parts through which client connections go. A killed guard ends its HAProxy; the guard's parent
does not."""


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
        takes_streams=part in _IN_FRONT,  # Serve replaces it after a timeout
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
"""Maximum recovery time in seconds by kind, on an otherwise idle machine. After a guard is killed,
HAProxy serves again within 2 s. If the guard's parent is killed, it never stops serving: Serve's
manager is replaced, and needs time to start."""
