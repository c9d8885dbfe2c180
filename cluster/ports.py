"""TCP ports for the fleets of one machine: no port is assigned to two processes."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys

PORTS_PER_FLEET = 400
"""Number of loopback ports per fleet, on which HAProxy connects to its gateways. Serve does not
reuse the port of an exited gateway for a while (RAY_SERVE_PORT_QUARANTINE_S)."""
GATEWAY_PORTS = range(10_000, 24_000)
SINGLE_PORTS = range(24_000, 30_000)
"""Ports for `free_ports`. This range and GATEWAY_PORTS lie below Kubernetes' node ports (from
30,000) and Linux's ephemeral ports (from 32,768), any of which another process may bind between the
choice and the use of a port."""


def free_ports(count: int) -> tuple[int, ...]:
    """`count` TCP ports that nothing listens on, reserved for as long as this process runs.

    Raises:
        OSError: fewer than `count` ports in SINGLE_PORTS are free.
    """
    ports: list[int] = []
    for port in secrets.SystemRandom().sample(SINGLE_PORTS, len(SINGLE_PORTS)):
        if len(ports) == count:
            break
        claim = _claim(port) if _may_listen(port) else None
        if claim is not None:
            claim.detach()  # keeps the descriptor open until the process ends
            ports.append(port)
    if len(ports) < count:
        raise OSError(
            f"fewer than {count} free ports from {SINGLE_PORTS.start} to {SINGLE_PORTS.stop - 1}: "
            "stop other fleets on this machine"
        )
    return tuple(ports)


class PortRange:
    """PORTS_PER_FLEET ports for a fleet's gateways, reserved until `close`.

    Raises:
        OSError: all ranges of GATEWAY_PORTS are in use by fleets on this machine.
    """

    def __init__(self) -> None:
        firsts = GATEWAY_PORTS[::PORTS_PER_FLEET]
        for first in secrets.SystemRandom().sample(firsts, len(firsts)):
            claim = _claim(first) if _may_listen(first) else None
            if claim is not None:
                self.first = first
                self._claim = claim
                return
        raise OSError(f"maximum of {len(firsts)} fleets on this machine reached: stop one of them")

    def close(self) -> None:
        """Releases the ports."""
        self._claim.close()


def _may_listen(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _claim(port: int) -> socket.socket | None:
    """A socket that claims `port` while it is open; None if another process has claimed it.

    It is bound to a name in Linux's abstract socket namespace: visible within the network
    namespace, as ports are, and released when the process exits for any reason. On other systems,
    nothing is claimed.
    """
    claim = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            claim.bind(f"\0rayfleet-port-{port}")
        except OSError:
            claim.close()
            return None
    return claim


def is_loopback(host: str) -> bool:
    """Whether a host name or address is loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
