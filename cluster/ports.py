"""TCP ports for the fleets of one machine, allocated without conflicts between processes."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys

PORTS_PER_FLEET = 400
"""Number of loopback ports of one fleet, on which HAProxy reaches its gateways. Serve does not
reuse the port of a stopped gateway for a while (RAY_SERVE_PORT_QUARANTINE_S)."""
GATEWAY_PORTS = range(10_000, 24_000)
SINGLE_PORTS = range(24_000, 30_000)
"""Both ranges are below Kubernetes' node ports (from 30,000) and Linux's ephemeral ports (from
32,768), which other processes may take between allocation and use."""


def free_ports(count: int) -> tuple[int, ...]:
    """Allocates `count` free TCP ports for the lifetime of this process.

    Raises:
        OSError: fewer of SINGLE_PORTS are free.
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
            f"fewer than {count} free ports in {SINGLE_PORTS.start}-{SINGLE_PORTS.stop - 1}"
        )
    return tuple(ports)


class PortRange:
    """PORTS_PER_FLEET ports for a fleet's gateways, reserved until `close`.

    Raises:
        OSError: all ranges in GATEWAY_PORTS are in use by fleets on this machine.
    """

    def __init__(self) -> None:
        firsts = GATEWAY_PORTS[::PORTS_PER_FLEET]
        for first in secrets.SystemRandom().sample(firsts, len(firsts)):
            claim = _claim(first) if _may_listen(first) else None
            if claim is not None:
                self.first = first
                self._claim = claim
                return
        raise OSError(
            f"no free port range: {len(firsts)} fleets are running on this machine, the maximum"
        )

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

    It is bound to a name in Linux's abstract socket namespace, which has the scope of ports (the
    network namespace) and is released whenever the process ends. On other systems ports of
    different fleets may conflict.
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
