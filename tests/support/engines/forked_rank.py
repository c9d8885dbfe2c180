"""Ranks forked from a server that has imported torch, which takes longer than most tests do."""

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
"""Its server has imported torch."""


class ForkedRank:
    """A rank's child process as RankGroup holds one: of `subprocess.Popen`, what it asks for.

    Args:
        rank: its place in the group.
        config: the group's engine configuration.
        directory: the group's private folder.
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
        """As `poll`."""
        return self.poll()

    def poll(self) -> int | None:
        """Its exit status, negative if a signal ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        """Returns when it has ended. Raises subprocess.TimeoutExpired, in seconds."""
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()


def _run(arguments: tuple[str, ...], stdin: Connection) -> None:
    """What `python -m worker.rank.main` does, but for letting others on the machine go first: they
    are other tests, and rank 0 would wait."""
    from worker.rank import main

    os.dup2(stdin.fileno(), 0)
    sys.argv = ["rank", *arguments]
    with patch.object(main, "yield_cpu_to_others", lambda added: None):
        main.main()


@contextmanager
def forking_ranks() -> Iterator[None]:
    """Within it, groups of ranks fork their children."""

    def spawn(group: RankGroup, rank: int) -> None:
        child = ForkedRank(rank, group._config, group._directory)
        alike = cast("subprocess.Popen[bytes]", child)
        group._children[os.pidfd_open(child.pid)] = (rank, alike)

    with patch.object(RankGroup, "_spawn", spawn):
        yield
