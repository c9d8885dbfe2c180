"""Measurements and checks of the campaign that kills HAProxy."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.ports import free_ports
from tests.campaigns.proxy import Kill, judge
from tests.support.fleet.proxy_loss import HAPROXY, MANAGER, Probe, Victims, wait_until


def kill(name: str, silence_s: float = 0.1, num_failed: int = 0, num_cut: int = 0) -> Kill:
    return Kill(
        name=name, silence_s=silence_s, num_failed=num_failed, num_cut=num_cut, back_s=silence_s
    )


@pytest.mark.parametrize(
    ("kills", "num_left", "names"),
    [
        ([kill(HAPROXY, num_failed=9, num_cut=4), kill(MANAGER)], 0, []),
        ([kill(HAPROXY, 3.5), kill(HAPROXY), kill(MANAGER)], 0, ["haproxy_killed_unreachable_s"]),
        ([kill(HAPROXY), kill(MANAGER, num_failed=1)], 0, ["manager_killed_failed"]),
        ([kill(HAPROXY), kill(MANAGER, num_cut=1)], 0, ["manager_killed_failed"]),
        ([kill(HAPROXY), kill(MANAGER, 29.0)], 0, ["manager_killed_unreachable_s"]),
        ([kill(HAPROXY), kill(MANAGER)], 2, ["processes_left"]),
    ],
)
def test_what_was_promised_is_judged(kills: list[Kill], num_left: int, names: list[str]) -> None:
    assert [check.name for check in judge(kills, num_left) if not check.holds] == names


def test_the_longest_time_without_an_answer_is_found() -> None:
    (port,) = free_ports(1)
    with Probe(f"http://127.0.0.1:{port}/") as probe:
        wait_until(lambda: len(probe.failures) > 3, "failures")
    assert probe.num_failed(probe.failures[0]) == len(probe.failures)
    assert probe.num_failed(time.monotonic()) == 0
    probe.answers += [10.0, 11.0, 14.5, 15.0]
    assert probe.silence_s(10.5, 15.5) == 3.5
    assert probe.silence_s(2.0, 11.0) == 8.0
    assert probe.silence_s(16.0, 17.0) == 1.0


def test_a_process_that_is_silent_is_no_answer() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with Probe(f"http://127.0.0.1:{silent.getsockname()[1]}/") as probe:
            connection, _ = silent.accept()
            assert probe.answers == probe.failures == []
            connection.close()
            wait_until(lambda: len(probe.failures) == 1, "a failure")
            silent.close()


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed at the end of the block."""
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


def test_what_a_failing_test_has_started_ends_with_it() -> None:
    with pytest.raises(AssertionError), started("sleep", "600") as process:
        raise AssertionError
    assert process.returncode == -signal.SIGKILL


def test_processes_are_found_by_name_and_by_title() -> None:
    with started("sleep", "600") as one, started("tail", "-f") as other:
        victims = Victims(lambda: [one.pid, other.pid])
        wait_until(lambda: victims.find("sleep") == [one.pid], "the first")
        wait_until(lambda: victims.find("tail") == [other.pid], "the second")
        assert victims.find("tail -f") == []
        victims.kill("sleep")
        one.wait()
        assert one.returncode == -signal.SIGKILL
        assert victims.killed == {one.pid}
        assert victims.find("sleep") == []
