"""What HAProxy says on its admin socket: who is connected through it, and to which gateway."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import NamedTuple

_TIMEOUT_S = 3.0
_SESSION = re.compile(r"\bsrc=\S*:(\d+) fe=http_frontend be=\S+ srv=(\S+)")
_REPLICA = "SERVE_REPLICA_"


class Session(NamedTuple):
    """A request that is being answered."""

    port: int
    """Of the client."""
    server: str
    """Ends with the replica's id."""


def sessions(directory: Path) -> list[Session]:
    """Requests under way through the HAProxy that takes new ones; none where it does not answer.

    One that has been replaced has finished listening there; it lives on for its streams.
    """
    found = _SESSION.findall(_ask(directory, "show sess"))
    return [Session(int(port), server) for port, server in found if server.startswith(_REPLICA)]


def gateways_up(directory: Path) -> int:
    """How many gateways it sends requests to."""
    rows = [line.split(",") for line in _ask(directory, "show stat").splitlines()]
    servers = [row for row in rows if len(row) > 17 and row[1].startswith(_REPLICA)]
    return sum(row[17].startswith("UP") for row in servers)


def replica_of(server: str) -> str:
    """The replica's id in a server's name."""
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
