"""Requests continue if HAProxy or its manager is killed, and neither outlives the fleet.

The last of the tests with the common fleet, which it kills in the end. `make check-proxy` kills
each process five times and measures the outages.
"""

from __future__ import annotations

import os
import signal

import pytest

from cluster.environment import has_haproxy
from tests.campaigns.checks import is_whole
from tests.support.fleet.client_load import ClientLoad, ClientOptions
from tests.support.fleet.proxy_loss import HAPROXY, MANAGER, Probe, Victims, wait_until
from tests.support.fleet.running_fleet import API_KEY, MODEL, RunningFleet, parent_of

LOAD = ClientOptions(num_clients=4, num_idle_clients=0, long_output_len=50, pause_s=1.0)
"""Half a minute of load while Serve replaces a manager; pauses leave processors to other tests."""
PROBE_S = 0.1
"""Seconds between requests, each on a new connection."""

pytestmark = pytest.mark.skipif(not has_haproxy(), reason="HAProxy's wheel is not installed")


def load_on(fleet: RunningFleet) -> ClientLoad:
    headers = {"authorization": f"Bearer {API_KEY}"}
    return ClientLoad(fleet.base_url, LOAD, MODEL, headers)


@pytest.mark.long  # tests/cluster/test_haproxy_guard.py does the same without Serve
def test_killed_haproxy_is_back(fleet: RunningFleet) -> None:
    """Restarted by its guard, not by Serve, which would take 20 s and replace its manager as
    well."""
    victims = Victims(fleet.processes)
    [haproxy] = victims.find(HAPROXY)
    guard = parent_of(haproxy)
    with Probe(f"{fleet.base_url}/health", PROBE_S) as probe, load_on(fleet) as load:
        load.wait_for(10)
        began = victims.kill(HAPROXY)
        probe.wait_answer(began)
        assert parent_of(victims.wait_back()) == guard
        begun = len(load.records)
        load.wait_for(LOAD.num_clients + 10)
        assert sum(map(is_whole, load.records[begun:])) >= 10


@pytest.mark.long  # tests/cluster/test_haproxy_guard.py does the same without Serve
def test_no_request_fails_where_the_manager_is_killed(fleet: RunningFleet) -> None:
    victims = Victims(fleet.processes)
    with Probe(f"{fleet.base_url}/health", PROBE_S) as probe, load_on(fleet) as load:
        load.wait_for(10)
        victims.kill(MANAGER)
        victims.wait_replaced()
        load.wait_for(10)
        records = load.stop()
    assert probe.failures == []
    assert [record.error for record in records if not is_whole(record)] == []


def test_a_killed_fleet_leaves_no_process(fleet: RunningFleet) -> None:
    """HAProxy is an orphan by then, since its manager was killed before."""
    victims = Victims(fleet.processes)
    victims.kill(MANAGER)
    assert len(victims.find(HAPROXY)) == 1
    os.kill(fleet.process.pid, signal.SIGKILL)
    # Ray's agents look for their head for another minute after a worker has died.
    agents = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")

    def is_gone() -> bool:
        return not set(fleet.processes()) - {pid for name in agents for pid in victims.find(name)}

    wait_until(is_gone, "the end of all others")
