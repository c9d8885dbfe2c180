"""Process that Serve starts in place of HAProxy; restarts the guard, its child.

Two processes supervise HAProxy, so that it keeps running if either is killed. This one, whose
process id is known to Serve, waits and forwards signals. Its child is the guard, HAProxy's own
parent (see `cluster.haproxy_guard`, also for the upstream change that makes both unnecessary):

- If the guard is killed, its HAProxy exits with it; both are restarted immediately, with the same
  configuration and without Serve.
- If this process is killed, the guard keeps HAProxy running without interruption, unless Serve has
  stopped HAProxy.

Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback

from cluster.haproxy_guard import (
    SHORTEST_PAUSE_S,
    STOPPING,
    Guard,
    die_with_parent,
    handle_signals,
    has_ended,
    open_raylet,
)


class Parent:
    """Parent of one guard.

    Args:
        binary: path of the HAProxy binary.
        arguments: command-line arguments that Serve gives to HAProxy.
        configuration: text of the configuration file in `arguments`.
    """

    def __init__(self, binary: str, arguments: list[str], configuration: str) -> None:
        self._binary = binary
        self._arguments = arguments
        self._configuration = configuration
        self._manager: int | None = None
        self._manager_pidfd = -1
        self._guard = 0
        self._is_stopping = False

    def run(self) -> int:
        """Runs guards until HAProxy has exited and is not restarted; returns the exit status."""
        try:
            raylet = open_raylet()
        except ProcessLookupError:
            return 0
        if raylet is None:
            die_with_parent()
        else:
            os.close(raylet)
        handle_signals(self._stop)
        self._find_manager()
        # A session of its own: Ray kills the process group of Serve's manager with the manager.
        with contextlib.suppress(PermissionError):
            os.setsid()
        is_restart = False
        while not self._is_stopping:
            self._start_guard(is_restart=is_restart)
            _, status = os.waitpid(self._guard, 0)
            self._guard = 0
            if os.WIFEXITED(status):
                return os.WEXITSTATUS(status)
            if self._manager_has_ended:
                break
            print(
                "haproxy_parent: the guard was killed: restarting it", file=sys.stderr, flush=True
            )
            is_restart = True
            time.sleep(SHORTEST_PAUSE_S)  # its HAProxy has to release its ports
        return 1

    def _find_manager(self) -> None:
        """Finds Serve's manager, the parent of this process. If the manager has exited, the new
        parent is in another process group, since each of Ray's workers has its own."""
        parent = os.getppid()
        with contextlib.suppress(OSError):
            if parent > 1 and os.getpgid(parent) == os.getpgrp():
                self._manager_pidfd = os.pidfd_open(parent)
                self._manager = parent

    @property
    def _manager_has_ended(self) -> bool:
        return self._manager is None or has_ended(self._manager_pidfd)

    def _start_guard(self, *, is_restart: bool) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        parent = os.getpid()
        guard = os.fork()
        if not guard:
            self._run_guard(parent, is_restart=is_restart)
        self._guard = guard
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    def _run_guard(self, parent: int, *, is_restart: bool) -> None:
        """Runs the guard in the child process, and exits."""
        status = 1
        try:
            status = Guard(
                self._binary,
                self._arguments,
                self._configuration,
                parent=parent,
                manager=None if self._manager_has_ended else self._manager,
                is_restart=is_restart,
            ).run()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _stop(self, number: int) -> None:
        self._is_stopping = True
        if self._guard:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._guard, number)
