"""Kills processes that a test has started if the test's process is killed and cannot clean up.

`python -m tests.support.reaper` reads marks from standard input, one per line, until it is closed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT


def kill_with_this_process(mark: str) -> None:
    """Kills all processes whose environment has `mark` when this process has ended.

    Args:
        mark: NAME=VALUE, unique to the processes that the test starts.
    """
    pipe = _reaper().stdin
    assert pipe is not None
    pipe.write(f"{mark}\n".encode())
    pipe.flush()


def marked(mark: str) -> Iterator[int]:
    """IDs of the processes whose environment has `mark`."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


@cache
def _reaper() -> subprocess.Popen[bytes]:
    # In a session of its own, so that signals to this process's group do not reach it.
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.reaper"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def main() -> None:
    """Waits for the end of standard input, then kills the marked processes."""
    marks = {line.strip() for line in sys.stdin}
    for mark in marks:
        for _ in range(2):  # a process may start another one in the meantime
            for pid in marked(mark):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
