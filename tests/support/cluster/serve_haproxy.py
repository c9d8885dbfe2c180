"""HAProxy as started by Ray Serve through rayfleet's wrapper, with rayfleet's settings.

Gateways are sockets that close on command. A Manager is Serve's manager in a separate process.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from cluster.environment import haproxy_settings
from cluster.haproxy import BINARY_VARIABLE
from cluster.haproxy_guard import RAYLET_VARIABLE
from cluster.ports import free_ports
from tests.support.forking import Forker

HOST = "127.0.0.1"
PIECE = 2**16
DEADLINE_S = 120
"""Timeout in seconds for operations that take a second on an idle machine."""
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_FORKER = Forker("ray.serve._private.haproxy", __name__)


@dataclass
class Gateway:
    """Answers with its name, and closes connections like a process that shuts down."""

    name: str
    drops_used: bool = False
    """Whether to close a used connection when its next request arrives."""
    num_dropped: int = 0
    num_waiting: int = 0
    heads: list[bytes] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    ended: list[asyncio.StreamWriter] = field(default_factory=list)
    """Connections closed during a request or its response."""
    _idle: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def go(self) -> None:
        """Stops listening, and closes idle connections unless `drops_used` is set."""
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
                self.heads.append(head)
                if self.drops_used and num_served and b"/-/healthz" not in head:
                    self.num_dropped += 1
                    break
                if b"/drop" in head:
                    break
                await reader.readexactly(content_length(head))
                if b"/pour" in head:
                    await _pour(writer)
                if b"/wait" in head:
                    self.num_waiting += 1
                    await self.go_on.wait()
                name = self.name.encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(name), name))
                num_served += 1
        if writer not in self._idle:
            self.ended.append(writer)
        self._idle.discard(writer)
        writer.close()


async def _pour(writer: asyncio.StreamWriter) -> None:
    """Sends a response that never ends."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"%x\r\n%s\r\n" % (PIECE, bytes(PIECE)))
        await writer.drain()


def settings_of(directory: Path) -> dict[str, str]:
    """Environment variables for Serve."""
    (port,) = free_ports(1)
    # Otherwise Serve's own gateways, which do not exist here, would listen on the last port.
    return {**haproxy_settings(directory / "haproxy", HOST, port, 10_000), "port": str(port)}


class Proxy:
    """HAProxy managed by Ray Serve.

    Args:
        settings: result of `settings_of`.
        knows_routes: whether the manager has received the applications; a new one has not.
    """

    def __init__(self, settings: dict[str, str], *, has_routes: bool = True) -> None:
        from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig
        from ray.serve.config import HTTPOptions

        def ours(name: str) -> str:
            return settings[f"RAY_SERVE_HAPROXY_{name}"]

        self.port = int(settings["port"])
        self.directory = Path(ours("CONFIG_FILE_LOC")).parents[1]
        config = HAProxyConfig(
            socket_path=ours("SOCKET_PATH"),
            server_state_base=ours("SERVER_STATE_BASE"),
            server_state_file=ours("SERVER_STATE_FILE"),
            nbthread=int(ours("NBTHREAD")),
            stats_port=int(ours("STATS_PORT")),
            metrics_port=int(ours("METRICS_PORT")),
            metrics_enabled=False,
            timeout_client_s=int(ours("TIMEOUT_CLIENT_S")),
            timeout_server_s=int(ours("TIMEOUT_SERVER_S")),
            hard_stop_after_s=int(ours("HARD_STOP_AFTER_S")),
            retry_on=ours("RETRY_ON"),
            retries=int(ours("RETRIES")),
            bufsize=int(ours("TUNE_BUFSIZE")),
            observe_error_limit=int(ours("OBSERVE_ERROR_LIMIT")),
            health_check_inter=ours("HEALTH_CHECK_INTER"),
            health_check_rise=int(ours("HEALTH_CHECK_RISE")),
            has_received_routes=has_routes,
            has_received_servers=has_routes,
            http_options=HTTPOptions(host=HOST, port=self.port),
        )
        self.config: Any = config
        self._api: Any = HAProxyApi(config, {}, ours("CONFIG_FILE_LOC"))
        self._fallback: Gateway | None = None

    def fall_back_on(self, gateway: Gateway | None) -> None:
        self._fallback = gateway

    def _take(self, gateways: list[Gateway]) -> None:
        from ray.serve._private.haproxy import BackendConfig, ServerConfig

        servers = [ServerConfig(g.name, HOST, g.port) for g in gateways]
        backend = BackendConfig(name="app", path_prefix="/", app_name="app", servers=servers)
        if self._fallback is not None:
            name, port = self._fallback.name, self._fallback.port
            backend.fallback_server = ServerConfig(name, HOST, port)
        self._api.set_backend_configs({"app": backend} if gateways else {})

    async def start(self, *gateways: Gateway) -> None:
        self._take(list(gateways))
        await self._api.start()
        await asyncio.sleep(0.05)

    async def reload(self, *gateways: Gateway) -> None:
        self._take(list(gateways))
        await self._api.reload()

    async def wait_old_ended(self) -> None:
        async with asyncio.timeout(120):
            while self._api.has_alive_old_procs():
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        await self._api.stop()

    async def connect(self) -> Connection:
        return await asyncio.open_connection(HOST, self.port)


def content_length(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    return sum(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))


async def get(
    connection: Connection, path: str = "/", size: int = 8, *, in_two: bool = False
) -> tuple[int, str, bool]:
    """Status, body, and whether the response announced that the connection closes."""
    reader, writer = connection
    writer.write(f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {size}\r\n\r\n".encode())
    if in_two:
        await asyncio.sleep(0.05)
    writer.write(b"x" * size)
    async with asyncio.timeout(120):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        body = await reader.readexactly(content_length(head))
    return int(head.split()[1]), body.decode(), b"connection: close" in head


class Manager:
    """Serve's manager of HAProxy in a separate process, like a child of the node's raylet.

    It is forked from a server that has imported Ray Serve, because the import takes longer than
    everything else.

    Args:
        settings: result of `settings_of`.
        raylet: any process, or None.
    """

    def __init__(self, settings: dict[str, str], raylet: int | None) -> None:
        self._pipe, other = multiprocessing.Pipe()
        environment = {**settings, **({RAYLET_VARIABLE: str(raylet)} if raylet else {})}
        self._process = _FORKER.start(_manage, settings, environment, other)
        other.close()

    async def apply(self, *gateways: Gateway) -> None:
        """Starts HAProxy with these gateways, or replaces a running one."""
        await self._command([(gateway.name, gateway.port) for gateway in gateways])

    async def stop(self) -> None:
        """Stops HAProxy and ends the manager, as Serve's controller does."""
        await self._command("stop")
        await self.kill()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    async def kill(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.join)

    async def _command(self, what: object) -> None:
        self._pipe.send(what)
        async with asyncio.timeout(2 * DEADLINE_S):
            assert await asyncio.to_thread(self._pipe.recv) == "done"


def _manage(settings: dict[str, str], environment: dict[str, str], pipe: Pipe) -> None:
    from ray.serve._private import haproxy

    os.environ.update(environment)
    haproxy.RAY_SERVE_HAPROXY_BINARY_PATH = settings[BINARY_VARIABLE]
    asyncio.run(_carry_out(settings, pipe))


async def _carry_out(settings: dict[str, str], pipe: Pipe) -> None:
    proxy = Proxy(settings, has_routes=False)
    apply = proxy.start
    with contextlib.suppress(EOFError):  # the test has ended
        while True:
            command = await asyncio.to_thread(pipe.recv)
            if command == "stop":
                await proxy.stop()
            else:
                await apply(*(Gateway(name, port=port) for name, port in command))
                apply = proxy.reload
            pipe.send("done")
