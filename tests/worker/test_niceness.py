"""Processes that compute on CPU yield to others, within their session and beyond."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.engines.forked_rank import RANK_FORKER
from worker import niceness
from worker.niceness import RANK_NICENESS


def yielding(enabled: Path, own: Path, leads_session: bool, replies: Connection) -> None:
    """Yields and sends its niceness, in a separate process."""
    if leads_session:
        os.setsid()
    niceness._AUTOGROUP_ENABLED, niceness._OWN_AUTOGROUP = enabled, own
    niceness.yield_cpu_to_others(RANK_NICENESS)
    replies.send((os.getpriority(os.PRIO_PROCESS, 0), os.getsid(0) == os.getpid()))


def after_yielding(enabled: Path, own: Path, *, leads_session: bool = False) -> tuple[int, bool]:
    """Niceness of a process that has yielded, and whether it leads a session."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = RANK_FORKER.start(yielding, enabled, own, leads_session, theirs)
    theirs.close()
    found: tuple[int, bool] = mine.recv()
    process.join()
    return found


def expected(added: int) -> int:
    return min(os.getpriority(os.PRIO_PROCESS, 0) + added, 19)


@pytest.mark.parametrize("leads_session", [False, True])
def test_applies_to_other_sessions_where_autogroups_count(
    tmp_path: Path, leads_session: bool
) -> None:
    enabled, own = tmp_path / "enabled", tmp_path / "autogroup"
    enabled.write_text("1\n")
    after = after_yielding(enabled, own, leads_session=leads_session)
    assert after == (expected(RANK_NICENESS), True)
    assert own.read_text() == str(expected(RANK_NICENESS))


@pytest.mark.parametrize("content", ["0\n", None])
def test_stays_in_its_session_where_autogroups_do_not_count(
    tmp_path: Path, content: str | None
) -> None:
    enabled, own = tmp_path / "enabled", tmp_path / "autogroup"
    if content is not None:
        enabled.write_text(content)
    assert after_yielding(enabled, own) == (expected(RANK_NICENESS), False)
    assert not own.exists()
