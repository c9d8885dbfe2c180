"""TCP connections and sockets of processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def tcp_connections(pid: int) -> list[Any]:
    """A process's, as psutil tells them; none where it has ended."""
    with suppress(psutil.Error):
        return list(psutil.Process(pid).net_connections("tcp"))
    return []


def listening_ports(pid: int) -> set[int]:
    """TCP ports where a process listens."""
    return {c.laddr.port for c in tcp_connections(pid) if c.status == psutil.CONN_LISTEN}


def clients_through(proxy: Collection[Any], port: int, server: Collection[int]) -> frozenset[int]:
    """Ports of a proxy's clients that may be connected through it to one server.

    A proxy's two ends of a request cannot be told to belong together: where it is connected to that
    server at all, they may all be. One that was replaced when a server had gone knows one other.

    Args:
        proxy: its connections, see `tcp_connections`.
        port: where its clients reach it.
        server: ports where that server listens.
    """
    if not any(c.raddr.port in server for c in proxy if c.status == psutil.CONN_ESTABLISHED):
        return frozenset()
    return taken_at(port, proxy)


def taken_at(port: int, connections: Collection[Any]) -> frozenset[int]:
    """Ports of the clients whose connections to `port` are open."""
    open_ones = [c for c in connections if c.status == psutil.CONN_ESTABLISHED]
    return frozenset(c.raddr.port for c in open_ones if c.laddr.port == port)


def sockets_of(pid: int) -> dict[str, int]:
    """File descriptors of a process's sockets by inode, which psutil does not tell."""
    found = {}
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(link)
                if target.startswith("socket:["):
                    found[target[8:-1]] = int(link.name)
    return found
