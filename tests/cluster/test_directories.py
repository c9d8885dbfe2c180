"""Private directories in /tmp are removed at the end of a fleet, or by a later start."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

from cluster.directories import (
    DIRECTORY_VARIABLE,
    private_directory,
    ray_directory,
    remove_private_directory,
)
from cluster.environment import Environment

MAKE = """
import sys
from pathlib import Path
from cluster.directories import private_directory, ray_directory

directory = private_directory(Path(sys.argv[1]))
if sys.argv[2] == "ray":
    logs = ray_directory(directory) / "session_2026-01-01_00-00-00_000000_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "file").touch()
    (logs.parent / "sockets").mkdir()
print(directory, flush=True)
sys.stdin.read()
"""


def start_owner(parent: Path, kind: str = "") -> tuple[subprocess.Popen[str], Path]:
    """Process that has created a private directory, which it owns until it ends."""
    command = [sys.executable, "-c", MAKE, str(parent), kind]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_start_removes_stale_directories_except_for_the_latest_logs(tmp_path: Path) -> None:
    left = []
    for number in range(3):
        process, directory = start_owner(tmp_path, "ray")
        kill(process)
        os.utime(directory / "owner.lock", (number, number))
        left.append(directory)
    directory = private_directory(tmp_path)
    assert set(tmp_path.iterdir()) == {directory, left[-1]}
    files = {path.name for path in left[-1].rglob("*") if path.is_file()}
    assert files == {"file", "owner.lock"}
    assert not list(left[-1].rglob("sockets"))


def test_directories_of_running_processes_are_kept(tmp_path: Path) -> None:
    owner, owned = start_owner(tmp_path)
    other, left = start_owner(tmp_path)
    # Its launcher was killed, but a process of its cluster still runs.
    child = subprocess.Popen(["sleep", "600"], env={**os.environ, DIRECTORY_VARIABLE: str(left)})
    # Popen returns before the kernel shows the environment of the new program.
    while str(left).encode() not in Path(f"/proc/{child.pid}/environ").read_bytes():
        time.sleep(0.001)
    kill(other)
    (foreign := tmp_path / "rf-another").mkdir()
    try:
        private_directory(tmp_path)
        assert owned.is_dir()
        assert left.is_dir()
        assert foreign.is_dir(), "a worker's own, without a lock"
    finally:
        child.kill()
        child.wait()
        kill(owner)
    private_directory(tmp_path)
    assert not owned.exists()
    assert not left.exists()
    assert foreign.is_dir()


def test_a_stopped_fleet_only_keeps_logs_of_a_failed_start(tmp_path: Path) -> None:
    for keep_logs in (False, True):
        directory = private_directory(tmp_path)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        session = ray_directory(directory) / "session_2026-01-01_00-00-00_000000_1"
        for folder in (directory / "haproxy", session / "sockets", session / "logs" / "serve"):
            folder.mkdir(parents=True)
            (folder / "file").touch()
        (ray_directory(directory) / "session_latest").symlink_to(session)
        (directory / "ray-token").touch()
        environment = Environment(
            directory=directory, haproxy=True, serve_host="127.0.0.1", gateway_ports=None
        )
        environment.close(keep_logs=keep_logs)
        environment.close(keep_logs=keep_logs)  # safe to call twice
        files = {path.name for path in directory.rglob("*") if path.is_file()}
        assert files == ({"file", "owner.lock"} if keep_logs else set())
        assert directory.exists() == keep_logs
        assert not (session / "sockets").exists()
        assert (session / "logs" / "serve" / "file").exists() == keep_logs


def test_without_logs_nothing_is_kept(tmp_path: Path) -> None:
    directory = private_directory(tmp_path)
    remove_private_directory(directory, keep_logs=True)
    assert not directory.exists()
