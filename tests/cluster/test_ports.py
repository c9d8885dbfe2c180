"""Ports are unique among all fleets of a machine."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import ports
from cluster.ports import GATEWAY_PORTS, PORTS_PER_FLEET, SINGLE_PORTS, PortRange, free_ports

GIVE_ALL = "from cluster import ports; ports.SINGLE_PORTS = range({0}, {1}); ports.free_ports({2})"


def test_ports_are_none_that_a_connection_may_take_meanwhile() -> None:
    singles = free_ports(50)
    assert len(set(singles)) == 50
    assert max(singles) < _first_of_connections()
    assert GATEWAY_PORTS.stop < _first_of_connections()


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen at random, the eight side ports of two fleets collided in one run of 200."""
    first = _unused_run_of_ports(4)
    monkeypatch.setattr(ports, "SINGLE_PORTS", range(first, first + 4))
    mine = {*free_ports(1), *free_ports(1)}
    assert len(mine) == 2
    in_another = [sys.executable, "-c", GIVE_ALL.format(first, first + 4, 3)]
    assert (
        "fewer than 3 free ports"
        in subprocess.run(in_another, capture_output=True, text=True).stderr
    )
    # Ports reserved meanwhile were released with their process.
    assert set(free_ports(2)).isdisjoint(mine)
    with pytest.raises(OSError, match="fewer than 1 free ports"):
        free_ports(1)


def test_gateways_of_two_fleets_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = PortRange()
    assert mine.first in GATEWAY_PORTS
    assert mine.first + PORTS_PER_FLEET <= GATEWAY_PORTS.stop
    monkeypatch.setattr(ports, "GATEWAY_PORTS", range(mine.first, mine.first + PORTS_PER_FLEET))
    with pytest.raises(OSError, match="maximum of 1 fleets on this machine"):
        PortRange()
    mine.close()
    PortRange().close()


def test_a_port_that_is_taken_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    port = _unused_run_of_ports(1)
    monkeypatch.setattr(ports, "SINGLE_PORTS", range(port, port + 1))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        with pytest.raises(OSError, match="fewer than 1 free ports"):
            free_ports(1)
    assert free_ports(1) == (port,)


def _unused_run_of_ports(count: int) -> int:
    """First of `count` consecutive ports that neither a fleet nor a connection uses meanwhile."""
    between = range(SINGLE_PORTS.stop, _first_of_connections())
    while True:
        first = random.choice(between[:-count])
        if all(_is_unused(port) for port in range(first, first + count)):
            return first


def _is_unused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _first_of_connections() -> int:
    """First port that Linux assigns to outgoing connections and to requests for any port."""
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
