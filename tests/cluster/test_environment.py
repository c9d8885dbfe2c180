"""What is set before Ray is imported, and what HAProxy is kept to."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.environment import (
    free_port_range,
    free_ports,
    haproxy_settings,
    has_haproxy,
    private_directory,
    ray_settings,
    require_authentication,
    serve_settings,
)
from cluster.haproxy import confine
from cluster.launch import end_processes_of, refuse_used_port, root_cause_last

TEMPLATE = """
frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:8000
listen stats
  bind *:8404
"""


def test_only_the_api_port_leaves_loopback() -> None:
    confined = confine(TEMPLATE, "0.0.0.0", 8000)
    bound = [line.strip() for line in confined.splitlines() if "bind" in line]
    assert bound == ["bind 127.0.0.1:9101", "bind 0.0.0.0:8000", "bind 127.0.0.1:8404"]


def test_a_token_is_made_in_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    require_authentication(tmp_path)
    path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert path.parent == tmp_path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text()) == 64
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_ray_without_authentication_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ValueError, match="RAY_AUTH_MODE"):
        require_authentication(tmp_path)


def test_settings_are_names_that_ray_reads() -> None:
    """A misspelt variable would be ignored in silence."""
    import ray

    package = Path(ray.__file__).parent
    known = (package / "serve" / "_private" / "constants.py").read_text()
    settings = serve_settings()
    if has_haproxy():
        directory = private_directory()
        settings |= haproxy_settings(directory, "127.0.0.1", 8000)
    unknown = [name for name in settings if f'"{name}"' not in known]
    assert unknown == []
    assert all(name.startswith("RAY_") for name in ray_settings())


def test_free_ports_differ_and_used_ones_are_refused() -> None:
    first, second = free_ports(2)
    assert first != second
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        with pytest.raises(ValueError, match="choose another --port"):
            refuse_used_port("127.0.0.1", first)


def test_fleets_of_one_machine_keep_their_gateways_apart() -> None:
    firsts = {free_port_range() for _ in range(8)}
    assert len(firsts) > 1
    assert all(10_000 <= first < 30_000 and first % 400 == 0 for first in firsts)


@pytest.mark.skipif(not has_haproxy(), reason="HAProxy's wheel is not installed")
def test_fleets_of_one_machine_keep_all_other_ports_apart(tmp_path: Path) -> None:
    """Serve would give each the same one, and the system a connection to any that listens."""
    settings = [haproxy_settings(tmp_path / str(i), "127.0.0.1", 8000) for i in range(2)]
    names = [n for n in settings[0] if n.endswith("_PORT") and "INGRESS" not in n]
    assert len(names) == 4
    ports = [fleet[name] for fleet in settings for name in names]
    assert len(set(ports)) == len(ports)


def test_processes_of_a_fleet_are_ended_whatever_they_do(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    environment = {**os.environ, "RAYFLEET_RUNTIME_DIRECTORY": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", stubborn], env=environment)
    end_processes_of(tmp_path, grace_s=0.2)
    assert child.wait(timeout=120) != 0


def test_the_root_cause_comes_last() -> None:
    text = "Deploying failed\n  \x1b[36mtrace\x1b[39m\nRuntimeError: no such folder\nsee the logs\n"
    lines = root_cause_last(text).splitlines()
    assert lines[-1] == "RuntimeError: no such folder"
    assert "\x1b" not in "".join(lines)
    chained = "hub.NotFoundError: words\nworker.wire.retry.Unavailable: download it first\n"
    assert root_cause_last(chained).splitlines()[-1].endswith("Unavailable: download it first")
