"""Queries HAProxy's admin socket for the clients that are connected to each gateway."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import NamedTuple

_TIMEOUT_S = 3.0
_SESSION = re.compile(r"\bsrc=\S*:(\d+) fe=http_frontend be=\S+ srv=(\S+)")
_REPLICA = "SERVE_REPLICA_"


class Session(NamedTuple):
    """A request in flight."""

    port: int
    """Client port."""
    server: str
    """Server name; ends with the replica's id."""


def sessions(directory: Path) -> list[Session]:
    """Requests in flight through the HAProxy that accepts new ones; empty if it does not respond. A
    HAProxy that was replaced no longer listens on the socket, and only serves its remaining
    streams."""
    found = _SESSION.findall(_ask(directory, "show sess"))
    return [Session(int(port), server) for port, server in found if server.startswith(_REPLICA)]


def gateways_up(directory: Path) -> int:
    """Number of gateways that are up."""
    rows = [line.split(",") for line in _ask(directory, "show stat").splitlines()]
    servers = [row for row in rows if len(row) > 17 and row[1].startswith(_REPLICA)]
    return sum(row[17].startswith("UP") for row in servers)


def replica_of(server: str) -> str:
    """Replica id in a server's name."""
    return server.rpartition("-")[2]


def _ask(directory: Path, command: str) -> str:
    path = next(directory.glob("haproxy/**/admin.sock"), None)
    if path is None:
        return ""
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(str(path))
            connection.sendall(f"{command}\n".encode())
            while part := connection.recv(1 << 16):
                answer += part
    except OSError:
        return ""
    return answer.decode(errors="replace")
