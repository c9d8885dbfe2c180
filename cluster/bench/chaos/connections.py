"""TCP connections of processes on this machine, from /proc (Linux)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_ESTABLISHED, _LISTEN = "01", "0A"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


class Connection(NamedTuple):
    """One end of a connection, or a socket that listens."""

    local: int
    remote: int
    """Port of the other end; 0 where it listens."""
    listens: bool
    inode: str


def connections(tables: Collection[str] = _TABLES) -> Iterator[Connection]:
    """All that are open or listen."""
    for table in tables:
        with suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                words = row.split()
                if words[3] in (_ESTABLISHED, _LISTEN):
                    local, remote = (int(words[i].rpartition(":")[2], 16) for i in (1, 2))
                    yield Connection(local, remote, words[3] == _LISTEN, words[9])


def descriptors(pid: int) -> dict[str, int]:
    """Sockets of a process: file descriptors by inode."""
    found = {}
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(link)
                if target.startswith("socket:["):
                    found[target[8:-1]] = int(link.name)
    return found


def clients_through(
    proxy: Collection[Connection], port: int, server: Collection[int]
) -> frozenset[int]:
    """Ports of a proxy's clients that may be connected through it to one server.

    A proxy's two ends of a request cannot be told to belong together: where it is connected to that
    server at all, they may all be. One that was replaced when a server had gone knows one other.

    Args:
        proxy: its connections.
        port: where its clients reach it.
        server: ports where that server listens.
    """
    if not any(connection.remote in server for connection in proxy):
        return frozenset()
    return frozenset(c.remote for c in proxy if c.local == port and not c.listens)
