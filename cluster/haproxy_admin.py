"""Commands at HAProxy's admin socket, at which a guard listens in HAProxy's place."""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path

ANSWER_TIMEOUT_S = 5.0
"""Seconds that HAProxy may take to answer, and a client of the guard to send its command."""
INFO, ADOPT = b"show info", b"adopt"
"""Commands: one of HAProxy's, and one to a guard, by which another guard adopts it: from then on it
ends when that connection is closed."""


def query(path: Path, command: bytes, timeout_s: float = ANSWER_TIMEOUT_S) -> bytes:
    """The answer to a command at a Unix socket; empty if nothing answers within `timeout_s`."""
    try:
        with contextlib.closing(connect(path, timeout_s)) as connection:
            connection.sendall(command + b"\n")
            return receive(connection)
    except OSError:
        return b""


def process_id(info: bytes) -> int | None:
    """Process id in an answer to `show info`; None where it has none."""
    found = re.search(rb"(?m)^Pid: (\d+)", info)
    return int(found[1]) if found is not None else None


def connect(path: Path, timeout_s: float = ANSWER_TIMEOUT_S) -> socket.socket:
    """A connection to a Unix socket. Raises OSError if nothing listens there."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def receive(connection: socket.socket, until: bytes | None = None) -> bytes:
    """Bytes that are received until the connection is closed, or `until` is among them."""
    received = b""
    while until is None or until not in received:
        piece = connection.recv(2**16)
        if not piece:
            break
        received += piece
    return received
