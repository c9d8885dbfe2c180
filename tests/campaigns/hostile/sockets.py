"""Connections with incomplete requests, as many as one process can have.

    python -m tests.campaigns.hostile.sockets PORT COUNT

Prints `open` when all connections are open, and a JSON object when the server has closed all of
them, or on timeout.
"""

from __future__ import annotations

import errno
import json
import resource
import select
import socket
import sys
import time
from collections.abc import Sequence

_BEGUN = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    b"G",
    b"",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",
)
"""Starts of requests: half of the headers, one letter, nothing, half of a body."""
_AT_ONCE = 200
"""Number of concurrent connection attempts; the server's backlog is short."""
_OPEN_S = 60.0
_CLOSE_S = 60.0
"""Timeout in seconds after the last connection was opened; reached only on failure."""


def descriptors() -> int:
    """Raises this process's file descriptor limit as far as possible; returns the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class HalfOpen:
    """Sockets, keyed by file descriptor, and the time at which each was opened.

    Args:
        port: port of the server on this machine.
        count: number of sockets.
    """

    def __init__(self, port: int, count: int) -> None:
        self._address = ("127.0.0.1", port)
        self._count = count
        self._epoll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._opened: dict[int, float] = {}
        self.num_opened = 0
        self.num_refused = 0
        self.lives: list[float] = []
        """Seconds from the last byte sent on each connection until the server closed it."""

    def open(self) -> None:
        """Opens all connections; returns when they are open, or on timeout."""
        deadline = time.monotonic() + _OPEN_S
        begun = 0
        while self.num_opened + self.num_refused < self._count and time.monotonic() < deadline:
            while begun < self._count and begun - self.num_opened - self.num_refused < _AT_ONCE:
                self._begin()
                begun += 1
            self._look()

    def wait_closed(self) -> None:
        """Waits until the server has closed all connections, or until timeout."""
        deadline = time.monotonic() + _CLOSE_S
        while self._opened and time.monotonic() < deadline:
            self._look()

    def _begin(self) -> None:
        try:
            connection = socket.socket()
        except OSError:
            self.num_refused += 1
            return
        connection.setblocking(False)
        if connection.connect_ex(self._address) not in (0, errno.EINPROGRESS):
            self.num_refused += 1
            connection.close()
            return
        self._sockets[connection.fileno()] = connection
        self._epoll.register(connection, select.EPOLLOUT)

    def _look(self) -> None:
        for number, events in self._epoll.poll(0.1):
            if number in self._opened:
                self._read(number)
            elif events & (select.EPOLLERR | select.EPOLLHUP):
                self.num_refused += 1
                self._close(number)
            else:
                self.num_opened += 1
                self._opened[number] = time.monotonic()
                self._epoll.modify(number, select.EPOLLIN)
                self._send(number)

    def _send(self, number: int) -> None:
        begun = _BEGUN[self.num_opened % len(_BEGUN)]
        try:
            if begun:
                self._sockets[number].send(begun)
        except OSError:
            self._end(number)

    def _read(self, number: int) -> None:
        try:
            while self._sockets[number].recv(4096):
                pass
        except BlockingIOError:
            return
        except OSError:
            pass  # a reset also closes it
        self._end(number)

    def _end(self, number: int) -> None:
        self.lives.append(time.monotonic() - self._opened.pop(number))
        self._close(number)

    def _close(self, number: int) -> None:
        self._epoll.unregister(number)
        self._sockets.pop(number).close()


def main(arguments: Sequence[str]) -> None:
    """Opens the connections, waits, and prints the result."""
    port, count = map(int, arguments)
    limit = descriptors()
    sockets = HalfOpen(port, count)
    sockets.open()
    print("open", flush=True)
    sockets.wait_closed()
    report = {
        "descriptors": limit,
        "opened": sockets.num_opened,
        "refused": sockets.num_refused,
        "closed": len(sockets.lives),
        "longest_s": max(sockets.lives, default=0.0),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
