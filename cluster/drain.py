"""Empties this machine's Ray node before it ends: `python -m cluster.drain --deadline SECONDS`.

Ray is told that the node will go. Serve then starts each of its replicas elsewhere, sends it no
more requests, and lets it finish those that it has. Returns when no replica is left here, the
deadline has passed, or Ray cannot be asked; what ends the node afterwards is the caller's. The Helm
chart runs it before a pod is stopped.

Processes are found in /proc, not through Ray: its control plane may be going at the same time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
POLL_S = 0.5
REPLICA_TITLE = b"ray::ServeReplica"


class Raylet(NamedTuple):
    """The process that is a Ray node."""

    pid: int
    node_id: str
    gcs_address: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0 if no replica is left, or none could be waited for."""
    parser = argparse.ArgumentParser(prog="python -m cluster.drain", description=__doc__)
    parser.add_argument("--deadline", type=int, required=True, help="seconds to wait at most")
    parser.add_argument("--node-id", help="which node, where this machine has several")
    arguments = parser.parse_args(argv)
    raylet = next((r for r in find_raylets() if arguments.node_id in (None, r.node_id)), None)
    if raylet is None:
        print("no Ray node here", file=sys.stderr)
        return 0
    if not announce(raylet, arguments.deadline):
        return 0
    return 0 if wait_for_replicas(raylet.pid, arguments.deadline) else 1


def find_raylets(proc: Path = PROC) -> Iterator[Raylet]:
    """The Ray nodes of this machine."""
    for pid, arguments in _processes(proc):
        if Path(arguments[0].decode(errors="replace")).name != "raylet":
            continue
        options = dict(word.decode().split("=", 1) for word in arguments[1:] if b"=" in word)
        yield Raylet(pid, options["--node_id"], options["--gcs-address"])


def announce(raylet: Raylet, deadline_s: int) -> bool:
    """Tells Ray that the node goes in `deadline_s`; False if there is nobody to tell."""
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
        *("--address", raylet.gcs_address, "--node-id", raylet.node_id),
        *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the node is to end"),
        *("--deadline-remaining-seconds", str(deadline_s)),
    ]
    return subprocess.run(command, check=False).returncode == 0


def wait_for_replicas(
    raylet_pid: int,
    deadline_s: float,
    proc: Path = PROC,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether all Serve replicas of a node have ended within `deadline_s`."""
    end = clock() + deadline_s
    while count_replicas(raylet_pid, proc):
        if clock() >= end:
            return False
        sleep(POLL_S)
    return True


def count_replicas(raylet_pid: int, proc: Path = PROC) -> int:
    """Serve replicas of a node: children of its raylet, known by their titles."""
    return sum(
        arguments[0].startswith(REPLICA_TITLE) and _parent(proc / str(pid)) == raylet_pid
        for pid, arguments in _processes(proc)
    )


def _processes(proc: Path) -> Iterator[tuple[int, list[bytes]]]:
    for entry in proc.glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile
            continue
        yield int(entry.name), arguments


def _parent(entry: Path) -> int:
    try:
        # Whatever is in the name, which stands in parentheses: the fields after it are plain.
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
