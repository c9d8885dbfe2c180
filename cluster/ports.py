"""TCP ports for the fleets of one machine: no two of its processes are given the same."""

from __future__ import annotations

import secrets
import socket
import sys

PORTS_PER_FLEET = 400
"""Loopback ports that HAProxy reaches gateways on. One that has ended keeps its own for a while."""
GATEWAY_PORTS = range(10_000, 24_000)
SINGLE_PORTS = range(24_000, 30_000)
"""Ports of both kinds lie below those that Kubernetes gives to nodes (from 30,000) and Linux to
outgoing connections (from 32,768): one of these may take a port between its choice and its use."""


def free_ports(count: int) -> tuple[int, ...]:
    """`count` TCP ports that nothing listens on, no other process's while this one lives.

    Raises:
        OSError: all of SINGLE_PORTS are taken.
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
    """PORTS_PER_FLEET ports for a fleet's gateways, no other fleet's until `close`.

    Raises:
        OSError: as many fleets run here as there is room for in GATEWAY_PORTS.
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
        """Gives them back."""
        self._claim.close()


def _may_listen(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _claim(port: int) -> socket.socket | None:
    """An object that keeps `port` from others while it is open; None where it is somebody's.

    It has a name in Linux's abstract namespace of sockets: known as far as ports reach (a network
    namespace), and gone with the process, however it ends. Elsewhere fleets are not kept apart.
    """
    claim = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            claim.bind(f"\0rayfleet-port-{port}")
        except OSError:
            claim.close()
            return None
    return claim
