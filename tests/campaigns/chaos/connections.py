"""TCP connections and sockets of processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def tcp_connections(pid: int) -> list[Any]:
    """TCP connections of a process, from psutil; empty if it has ended."""
    with suppress(psutil.Error):
        return list(psutil.Process(pid).net_connections("tcp"))
    return []


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    return {c.laddr.port for c in tcp_connections(pid) if c.status == psutil.CONN_LISTEN}


def clients_through(proxy: Collection[Any], port: int, server: Collection[int]) -> frozenset[int]:
    """Client ports whose requests a proxy may be forwarding to one server.

    The two connections of a forwarded request cannot be matched: if the proxy has any connection to
    the server, all of its clients may be affected. A proxy that was replaced before the server
    started has no connection to it.

    Args:
        proxy: connections of the proxy; see `tcp_connections`.
        port: port on which the proxy accepts clients.
        server: ports on which the server listens.
    """
    if not any(c.raddr.port in server for c in proxy if c.status == psutil.CONN_ESTABLISHED):
        return frozenset()
    return taken_at(port, proxy)


def taken_at(port: int, connections: Collection[Any]) -> frozenset[int]:
    """Client ports of the open connections to `port`."""
    open_ones = [c for c in connections if c.status == psutil.CONN_ESTABLISHED]
    return frozenset(c.raddr.port for c in open_ones if c.laddr.port == port)


def sockets_of(pid: int) -> dict[str, int]:
    """File descriptors of a process's sockets, keyed by inode, which psutil does not report."""
    found = {}
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(link)
                if target.startswith("socket:["):
                    found[target[8:-1]] = int(link.name)
    return found
