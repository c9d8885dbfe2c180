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
    """`count` TCP ports that nothing listens on, and that no living process was given.

    Raises:
        OSError: all of SINGLE_PORTS are taken.
    """
    ports: list[int] = []
    for port in secrets.SystemRandom().sample(SINGLE_PORTS, len(SINGLE_PORTS)):
        if len(ports) == count:
            break
        if _may_listen(port) and _claim(port):
            ports.append(port)
    if len(ports) < count:
        raise OSError(f"no {count} ports are free from {SINGLE_PORTS.start} on")
    return tuple(ports)


def free_port_range() -> int:
    """The first of PORTS_PER_FLEET ports for a fleet's gateways, under the same terms.

    Raises:
        OSError: as many fleets run here as there is room for in GATEWAY_PORTS.
    """
    firsts = GATEWAY_PORTS[::PORTS_PER_FLEET]
    for first in secrets.SystemRandom().sample(firsts, len(firsts)):
        if _may_listen(first) and _claim(first):
            return first
    raise OSError(f"{len(firsts)} fleets run on this machine: there are no ports for another")


def _may_listen(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _claim(port: int) -> bool:
    """Whether nobody else was given `port`; it is this process's then, until that ends.

    The claim is a name in Linux's abstract namespace of sockets: as far as ports reach (a network
    namespace), and gone with the process, however it ends. Elsewhere processes are not kept apart.
    """
    if sys.platform != "linux":
        return True
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0rayfleet-port-{port}")
    except OSError:
        claim.close()
        return False
    claim.detach()  # nothing closes the descriptor: it is to last as long as the process
    return True
