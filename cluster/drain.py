"""Drains this machine's Ray node before it stops: `python -m cluster.drain --deadline SECONDS`.

The node is reported to Ray as preempted. Serve then starts a replacement for each of its replicas
on another node, routes no more requests to the replica, and waits until it has finished the running
ones. The command returns when no replica is left on this node, the deadline has passed, or Ray
cannot be reached; the caller stops the node afterwards. The Helm chart runs it before a pod is
stopped.

Replicas are found among this machine's processes rather than through Ray, whose control plane may
stop meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

POLL_S = 0.5
REPLICA_TITLE = "ray::ServeReplica"

ListProcesses = Callable[[], Iterable[psutil.Process]]


class Raylet(NamedTuple):
    """The raylet process of a Ray node."""

    pid: int
    node_id: str
    gcs_address: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if replicas are left at the deadline, otherwise 0."""
    # Not CommandParser: its imports would take half a second of the pod's time to drain.
    parser = argparse.ArgumentParser(
        prog="python -m cluster.drain", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--deadline", type=int, required=True, help="maximum seconds to wait for running requests"
    )
    parser.add_argument("--node-id", help="id of the Ray node, if this machine runs several")
    arguments = parser.parse_args(argv)
    raylet = next((r for r in find_raylets() if arguments.node_id in (None, r.node_id)), None)
    if raylet is None:
        print("no Ray node is running on this machine", file=sys.stderr)
        return 0
    if not announce(raylet, arguments.deadline):
        return 0
    return 0 if wait_for_replicas(raylet.pid, arguments.deadline) else 1


def find_raylets(processes: ListProcesses = psutil.process_iter) -> Iterator[Raylet]:
    """The raylets of this machine's Ray nodes."""
    for process, arguments in _with_arguments(processes):
        if Path(arguments[0]).name != "raylet":
            continue
        options = dict(word.split("=", 1) for word in arguments[1:] if "=" in word)
        yield Raylet(process.pid, options["--node_id"], options["--gcs-address"])


def announce(raylet: Raylet, deadline_s: int) -> bool:
    """Reports to Ray that the node will stop in `deadline_s` seconds; returns False if Ray cannot
    be reached."""
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
        *("--address", raylet.gcs_address, "--node-id", raylet.node_id),
        *(
            "--reason",
            "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message",
            "the node is shutting down",
        ),
        *("--deadline-remaining-seconds", str(deadline_s)),
    ]
    return subprocess.run(command, check=False).returncode == 0


def wait_for_replicas(
    raylet_pid: int,
    deadline_s: float,
    processes: ListProcesses = psutil.process_iter,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Waits until all Serve replicas of a node have ended; returns False if some are left after
    `deadline_s`."""
    end = clock() + deadline_s
    while count_replicas(raylet_pid, processes):
        if clock() >= end:
            return False
        sleep(POLL_S)
    return True


def count_replicas(raylet_pid: int, processes: ListProcesses = psutil.process_iter) -> int:
    """Number of a node's Serve replicas: children of its raylet with a replica's process title."""
    count = 0
    for process, arguments in _with_arguments(processes):
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            count += arguments[0].startswith(REPLICA_TITLE) and process.ppid() == raylet_pid
    return count


def _with_arguments(processes: ListProcesses) -> Iterator[tuple[psutil.Process, list[str]]]:
    """Processes with their command lines; omits those that have no command line or have ended."""
    for process in processes():
        with contextlib.suppress(psutil.Error):
            if arguments := process.cmdline():
                yield process, arguments


if __name__ == "__main__":
    sys.exit(main())
