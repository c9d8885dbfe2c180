"""Client of HAProxy's admin socket, on which a guard listens in place of HAProxy."""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path

ANSWER_TIMEOUT_S = 5.0
"""Timeout in seconds for a response from HAProxy, and for a command from a client of the guard."""
INFO, ADOPT = b"show info", b"adopt"
"""Commands. INFO is HAProxy's own. A guard sends ADOPT to the guard that it adopts, which exits
when the connection with this command is closed."""


def query(path: Path, command: bytes, timeout_s: float = ANSWER_TIMEOUT_S) -> bytes:
    """Response to a command sent to a Unix socket; empty if there is no response within
    `timeout_s`."""
    try:
        with contextlib.closing(connect(path, timeout_s)) as connection:
            connection.sendall(command + b"\n")
            return receive(connection)
    except OSError:
        return b""


def process_id(info: bytes) -> int | None:
    """Process id in a response to `show info`; None if there is none."""
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
    """Bytes received until the connection is closed, or `until` has been received."""
    received = b""
    while until is None or until not in received:
        piece = connection.recv(2**16)
        if not piece:
            break
        received += piece
    return received
