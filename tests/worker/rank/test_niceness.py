"""Processes that compute on CPU let others go first, in their session and beyond it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
from pathlib import Path
from worker.rank import cpu

cpu._AUTOGROUP_ENABLED, cpu._OWN_AUTOGROUP = Path(sys.argv[1]), Path(sys.argv[2])
cpu.yield_cpu_to_others()
print(os.getpriority(os.PRIO_PROCESS, 0), os.getsid(0) == os.getpid())
"""


def told(enabled: Path, own: Path, *, leads_session: bool = False) -> list[str]:
    """Niceness, and whether the process leads a session; of one that has yielded."""
    command = [sys.executable, "-c", SCRIPT, str(enabled), str(own)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, start_new_session=leads_session
    ).stdout.split()


def niceness() -> str:
    return str(min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19))


@pytest.mark.parametrize("leads_session", [False, True])
def test_sessions_that_share_cores_are_told(tmp_path: Path, leads_session: bool) -> None:
    enabled, own = tmp_path / "enabled", tmp_path / "autogroup"
    enabled.write_text("1\n")
    assert told(enabled, own, leads_session=leads_session) == [niceness(), "True"]
    assert own.read_text() == niceness()


@pytest.mark.parametrize("content", ["0\n", None])
def test_it_stays_in_its_session_where_those_do_not_count(
    tmp_path: Path, content: str | None
) -> None:
    enabled, own = tmp_path / "enabled", tmp_path / "autogroup"
    if content is not None:
        enabled.write_text(content)
    assert told(enabled, own) == [niceness(), "False"]
    assert not own.exists()
