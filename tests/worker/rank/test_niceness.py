"""Processes that compute on CPU yield to others, within their session and beyond."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.engines.forked_rank import RANK_FORKER
from worker.rank import cpu


def yielding(enabled: Path, own: Path, leads_session: bool, priority_of: Connection) -> None:
    """Yields and reports its niceness, in a separate process."""
    if leads_session:
        os.setsid()
    cpu._AUTOGROUP_ENABLED, cpu._OWN_AUTOGROUP = enabled, own
    cpu.yield_cpu_to_others()
    priority_of.send((os.getpriority(os.PRIO_PROCESS, 0), os.getsid(0) == os.getpid()))


def priority_of(enabled: Path, own: Path, *, leads_session: bool = False) -> tuple[int, bool]:
    """Niceness of a process that has yielded, and whether it leads a session."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = RANK_FORKER.start(yielding, enabled, own, leads_session, theirs)
    theirs.close()
    found: tuple[int, bool] = mine.recv()
    process.join()
    return found


def niceness() -> int:
    return min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)


@pytest.mark.parametrize("leads_session", [False, True])
def test_sessions_that_share_cores_are_told(tmp_path: Path, leads_session: bool) -> None:
    enabled, own = tmp_path / "enabled", tmp_path / "autogroup"
    enabled.write_text("1\n")
    assert priority_of(enabled, own, leads_session=leads_session) == (niceness(), True)
    assert own.read_text() == str(niceness())


@pytest.mark.parametrize("content", ["0\n", None])
def test_it_stays_in_its_session_where_those_do_not_count(
    tmp_path: Path, content: str | None
) -> None:
    enabled, own = tmp_path / "enabled", tmp_path / "autogroup"
    if content is not None:
        enabled.write_text(content)
    assert priority_of(enabled, own) == (niceness(), False)
    assert not own.exists()
