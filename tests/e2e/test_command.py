"""The command itself: its errors, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli.doctor import check_cluster
from tests.support.fleet.running_fleet import ADMIN_KEY, API_KEY, DEADLINE_S, RunningFleet


def rayfleet(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S)


def test_version(tmp_path: Path) -> None:
    assert rayfleet("--version", cwd=tmp_path).stdout.startswith("rayfleet ")


def test_mistakes_cost_no_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = rayfleet("serve", "--port", port, cwd=tmp_path)
    assert result.returncode == 2
    assert "use another --port" in result.stderr.splitlines()[-1]
    missing = rayfleet("serve", str(tmp_path / "nothing"), cwd=tmp_path)
    assert missing.returncode == 2
    assert "does not exist" in missing.stderr.splitlines()[0]


def test_only_the_endpoint_and_token_guarded_ports_listen(fleet: RunningFleet) -> None:
    """Besides loopback, only Serve's gRPC servers listen, which require Ray's token."""
    pids = set(fleet.processes())
    inodes = {
        inode
        for pid in pids
        for fd in Path(f"/proc/{pid}/fd").glob("*")
        if (inode := _socket_inode(fd)) is not None
    }
    open_ports = [
        address
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for address, inode in _listeners(Path(table))
        if inode in inodes and not _is_loopback(address)
    ]
    assert len(open_ports) <= 3, "one gateway, two workers"


def test_the_key_is_demanded(fleet: RunningFleet) -> None:
    assert fleet.http.get("/v1/models", headers={"authorization": ""}).status_code == 401
    assert fleet.http.get("/v1/models").status_code == 200


@pytest.mark.parametrize("secret", [API_KEY, ADMIN_KEY], ids=["api", "admin"])
def test_a_key_is_nowhere_to_be_seen(fleet: RunningFleet, secret: str) -> None:
    """Neither in the process list, nor in inherited environments, nor in files that others may
    read."""
    key = secret.encode()
    session_folders = set()
    for pid in fleet.processes():
        process = Path(f"/proc/{pid}")
        command_line = process.joinpath("cmdline").read_bytes()
        assert key not in command_line
        session_folders |= set(re.findall(rb"--session_dir=([^\0]+)", command_line))
        if pid != fleet.process.pid:  # its own environment is unchangeable, and private to its user
            assert key not in process.joinpath("environ").read_bytes(), command_line
    (folder,) = session_folders
    files = [path for path in Path(folder.decode()).rglob("*") if path.is_file()]
    assert any(path.name.startswith("gcs_server") for path in files)
    assert not [path for path in files if key in path.read_bytes()]


def test_nobody_else_can_write_to_what_a_fleet_uses(fleet: RunningFleet) -> None:
    """Ray creates world-writable folders and sockets, which must be in a private folder."""
    used = set()
    for pid in fleet.processes():
        command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
        for option in (b"session_dir", b"temp_dir", b"store_socket_name", b"raylet_socket_name"):
            found = re.findall(rb"--" + option + rb"=([^\0]+)", command_line)
            used |= {Path(path.decode()) for path in found}
        used |= set(_open_files(pid))
    sessions = {path for path in used if path.name.startswith("session_")}
    (session,) = {path for path in sessions if path.parent.name == "ray"}
    runtime = Path(fleet.ray()[1]["RAYFLEET_RUNTIME_DIRECTORY"])
    used |= {session.parent, *session.parent.rglob("*"), runtime, *runtime.rglob("*")}
    names = {path.name for path in used}
    assert {"raylet", "plasma_store", "attach", "haproxy.cfg"} <= names, sorted(names)
    assert [str(path) for path in sorted(used) if _others_may_write(path)] == []


def test_doctor_knows_a_cluster_and_whether_it_is_let_in(
    fleet: RunningFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, environment = fleet.ray()
    for name, value in environment.items():
        if name.startswith("RAY_"):
            monkeypatch.setenv(name, value)
    (finding,) = check_cluster(address)
    assert finding.verdict == "ok", finding.text
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text("f" * 64)
    (finding,) = check_cluster(address)
    assert finding.verdict == "bad"
    assert "a token is required" in finding.text


def _socket_inode(fd: Path) -> str | None:
    try:
        target = str(fd.readlink())
    except OSError:
        return None
    return target[8:-1] if target.startswith("socket:[") else None


def _open_files(pid: int) -> Iterator[Path]:
    """Files that a process has open for writing, and paths of its Unix sockets."""
    sockets = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        row = line.split(maxsplit=7)
        if len(row) == 8 and row[7].startswith("/"):
            sockets[row[6]] = Path(row[7])
    for fd in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            target = str(fd.readlink())
            info = Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text()
            writes = int(re.findall(r"^flags:\s*(\d+)", info, re.MULTILINE)[0], 8) & os.O_ACCMODE
            if (inode := _socket_inode(fd)) in sockets:
                yield sockets[inode]
            elif target.startswith("/") and writes:
                yield Path(target)


def _others_may_write(path: Path) -> bool:
    """Whether other users can reach and change a file."""
    try:
        status = path.stat()
    except OSError:  # gone, or never had a path
        return False
    if stat.S_ISCHR(status.st_mode) or not status.st_mode & stat.S_IWOTH:
        return False
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents)


def _listeners(table: Path) -> list[tuple[str, str]]:
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return [(row[1].split(":")[0], row[9]) for row in rows if row[3] == "0A"]


def _is_loopback(address: str) -> bool:
    v6_loopback = "00000000000000000000000001000000"
    return address in ("0100007F", v6_loopback) or address.endswith("FFFF00000100007F")
