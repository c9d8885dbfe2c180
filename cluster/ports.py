"""TCP ports for the fleets of one machine: no port is given to two of its processes."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys

PORTS_PER_FLEET = 400
"""Loopback ports of one fleet, on which HAProxy reaches its gateways. Serve gives the port of a
gateway that has ended to no other for a while (RAY_SERVE_PORT_QUARANTINE_S)."""
GATEWAY_PORTS = range(10_000, 24_000)
SINGLE_PORTS = range(24_000, 30_000)
"""Both ranges lie below Kubernetes' node ports (from 30,000) and Linux's ephemeral ports (from
32,768), any of which another process may take between a port's choice and its use."""


def free_ports(count: int) -> tuple[int, ...]:
    """`count` TCP ports that nothing listens on, given to no other process while this one lives.

    Raises:
        OSError: fewer of SINGLE_PORTS are free.
    """
    ports: list[int] = []
    for port in secrets.SystemRandom().sample(SINGLE_PORTS, len(SINGLE_PORTS)):
        if len(ports) == count:
            break
        claim = _claim(port) if _may_listen(port) else None
        if claim is not None:
            claim.detach()  # nothing closes the descriptor: it is to last as long as the process
            ports.append(port)
    if len(ports) < count:
        raise OSError(f"no {count} ports are free from {SINGLE_PORTS.start} on")
    return tuple(ports)


class PortRange:
    """PORTS_PER_FLEET ports for a fleet's gateways, given to no other fleet until `close`.

    Raises:
        OSError: as many fleets run on this machine as GATEWAY_PORTS has ranges for.
    """

    def __init__(self) -> None:
        firsts = GATEWAY_PORTS[::PORTS_PER_FLEET]
        for first in secrets.SystemRandom().sample(firsts, len(firsts)):
            claim = _claim(first) if _may_listen(first) else None
            if claim is not None:
                self.first = first
                self._claim = claim
                return
        raise OSError(f"{len(firsts)} fleets run on this machine: there are no ports for another")

    def close(self) -> None:
        """Gives the ports back."""
        self._claim.close()


def _may_listen(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _claim(port: int) -> socket.socket | None:
    """A socket that claims `port` while it is open; None where another process has claimed it.

    It is bound to a name in Linux's abstract socket namespace: visible within the network
    namespace, as ports are, and released when the process ends, however it ends. On other systems
    fleets are not kept apart.
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
    """Whether a host's name or address is loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
