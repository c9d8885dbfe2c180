"""Processes forked from a server that has already imported slow modules."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from unittest.mock import patch


class Forker:
    """A fork server for given modules. multiprocessing has a single fork server, which imports the
    modules of its first user, so other users' processes would have to import their modules again.

    Args:
        modules: modules that the server imports when the first process is started.
    """

    def __init__(self, *modules: str) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(list(modules))

    def start(self, target: Callable[..., object], *arguments: object) -> ForkServerProcess:
        """Starts a process that calls `target`; arguments are pickled."""
        process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
        connect = self._server.connect_to_new_process
        with patch.object(forkserver, "connect_to_new_process", connect):
            process.start()
        return process
