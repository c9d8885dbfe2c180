"""Processes forked from one that has imported what takes longer than all that they do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from unittest.mock import patch


class Forker:
    """A server of its own for these modules: multiprocessing has one in all, which imports what
    its first user asks for, so that others' children would import anew.

    Args:
        modules: that the server imports when the first process is started.
    """

    def __init__(self, *modules: str) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(list(modules))

    def start(self, target: Callable[..., object], *arguments: object) -> ForkServerProcess:
        """A running process that calls `target`; arguments are pickled."""
        process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
        connect = self._server.connect_to_new_process
        with patch.object(forkserver, "connect_to_new_process", connect):
            process.start()
        return process
