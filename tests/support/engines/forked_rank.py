"""Ranks forked from a server that has imported torch, because the import takes longer than most
tests."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import cast
from unittest.mock import patch

import msgspec

from tests.support.forking import Forker
from worker.config import EngineConfig
from worker.core.ranks import RankGroup

RANK_FORKER = Forker("worker.rank.rank")
"""Forks ranks from a server that has imported torch."""


class ForkedRank:
    """A rank's child process, with the parts of `subprocess.Popen`'s interface that RankGroup uses.

    Args:
        rank: rank in the group.
        config: engine configuration of the group.
        directory: private folder of the group.
    """

    def __init__(self, rank: int, config: EngineConfig, directory: str) -> None:
        theirs, self.stdin = multiprocessing.Pipe(duplex=False)
        arguments = (str(rank), directory, msgspec.json.encode(config).decode())
        self._process = RANK_FORKER.start(_run, arguments, theirs)
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Same as `poll`."""
        return self.poll()

    def poll(self) -> int | None:
        """Exit status, negative if a signal ended the process; None while it is running."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the process has exited. Raises subprocess.TimeoutExpired after `timeout`
        seconds."""
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)

    def kill(self) -> None:
        """Kills the process."""
        self._process.kill()


def _run(arguments: tuple[str, ...], stdin: Connection) -> None:
    """Runs `python -m worker.rank.main` without lowering its priority; otherwise, rank 0 would wait
    for processes of other tests."""
    from worker.rank import main

    os.dup2(stdin.fileno(), 0)
    sys.argv = ["rank", *arguments]
    with patch.object(main, "yield_cpu_to_others", lambda added: None):
        main.main()


@contextmanager
def forking_ranks() -> Iterator[None]:
    """Context in which rank groups fork their child processes."""

    def spawn(group: RankGroup, rank: int) -> None:
        child = ForkedRank(rank, group._config, group._directory)
        alike = cast("subprocess.Popen[bytes]", child)
        group._children[os.pidfd_open(child.pid)] = (rank, alike)

    with patch.object(RankGroup, "_spawn", spawn):
        yield
