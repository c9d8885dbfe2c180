"""A fleet starts even if Serve's HAProxy manager hangs meanwhile: Serve replaces the manager."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cluster.environment import has_haproxy
from tests.support.fleet.proxy_loss import MANAGER, Victims, wait_until
from tests.support.fleet.running_fleet import start_fleet, stop_fleet


@pytest.mark.long
@pytest.mark.skipif(not has_haproxy(), reason="HAProxy's wheel is not installed")
def test_a_manager_that_hangs_during_the_start_is_replaced(tmp_path: Path) -> None:
    """Hangs as soon as it exists, so that it is never ready; Serve's own timeouts would fail the
    start."""
    fleet = start_fleet(tmp_path)
    try:
        managers = Victims(fleet.processes)
        wait_until(lambda: bool(managers.find(MANAGER)), "a manager")
        (hung,) = managers.find(MANAGER)
        os.kill(hung, signal.SIGSTOP)
        fleet.wait_ready(num_workers=1)
        assert hung not in fleet.processes()
    finally:
        stop_fleet(fleet)
