"""The request router in a plain Serve application, beside the fleet of all tests on its cluster."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.fleet.running_fleet import DEADLINE_S, RunningFleet
from tests.support.paths import ROOT

PATIENT = {
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "60",
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "60",
}
"""Serve sends a call elsewhere if the chosen replica does not report its queue length in 0.1 s."""


@pytest.mark.long  # tests/cluster/test_serve_router.py has the same calls without Ray
def test_a_serve_application_routes_by_prefix(fleet: RunningFleet) -> None:
    address, environment = fleet.ray()
    # A plain application has Serve's own settings; with HAProxy it may have no router of its own.
    plain = {name: v for name, v in environment.items() if not name.startswith("RAY_SERVE_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.fleet.routed_app", address],
        cwd=ROOT,
        env={**plain, **PATIENT},
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=True,
    )
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert len(set(first)) == 2
    assert first == second
