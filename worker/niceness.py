"""CPU priority of compute processes: lower than that of processes that forward requests."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

RANK_NICENESS: Final = 10
"""Niceness that a rank on CPU adds to its current one. Measured with two workers at 1.3 times their
sustainable load on two cores, which were shared with the gateway and clients: at 0, 5 and 10, the
median TTFT of urgent requests was 68, 56 and 53 ms, and throughput was 2,850, 2,906 and 3,097
tokens/s."""
COMPILER_NICENESS: Final = 12
"""Niceness that a grammar compiler adds to its current one. It is higher than a rank's, since a
step delays all streams and a compilation only one request. On a core that both use, Linux gives the
compiler 39 % and the rank 61 %. Alongside a busy process of niceness 0, the compiler gets 6 %,
which is still more than the 5 % below which it counts as hung."""

_AUTOGROUP_ENABLED = Path("/proc/sys/kernel/sched_autogroup_enabled")
_OWN_AUTOGROUP = Path("/proc/self/autogroup")


def yield_cpu_to_others(added: int) -> None:
    """Lowers the priority of this process, so that other processes get a core when they need one.

    Steps and compilations use all available CPU time, regardless of their priority. Gateways,
    frontends, schedulers and clients use little CPU time, but need it immediately: on cores shared
    with steps of the same priority, they wait several milliseconds each time they become runnable.

    Only for processes that do nothing but compute. Threads that start later inherit the priority.

    Args:
        added: niceness to add to the current one; the sum is at most 19.
    """
    niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + added, 19)
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    _yield_cpu_to_other_sessions(niceness)


def _yield_cpu_to_other_sessions(niceness: int) -> None:
    """Lowers the priority of this process relative to the processes of other sessions.

    With autogroups, Linux's default outside containers, cores are shared evenly among sessions, and
    niceness only applies within a session. HAProxy, which Ray starts in a separate session, waited
    up to three seconds for a core that it shared with two busy ranks. This stalled all streams. A
    compiler in the session of its gateway ran before all ranks, regardless of its niceness.
    """
    try:
        if _AUTOGROUP_ENABLED.read_text().strip() == "1":
            if os.getsid(0) != os.getpid():
                os.setsid()
            _OWN_AUTOGROUP.write_text(str(niceness))
    except OSError as error:
        logger.info("failed to lower the priority of this session: %s", error)
