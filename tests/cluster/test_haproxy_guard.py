"""HAProxy is restarted when it is killed, survives Serve's manager, and ends with its fleet.

HAProxy is real and managed by Serve's own code, and processes are really killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from cluster.directories import private_directory
from cluster.environment import has_haproxy
from cluster.haproxy_admin import process_id
from cluster.haproxy_admin import query as guard_query
from cluster.haproxy_guard import (
    CHECK_PERIOD_S,
    HUNG_S,
    has_routes,
    split_arguments,
)
from cluster.stopped_replicas import STOPPED_S
from tests.support.cluster.serve_haproxy import (
    DEADLINE_S,
    HOST,
    Gateway,
    Manager,
    Proxy,
    get,
    settings_of,
)

pytestmark = pytest.mark.skipif(not has_haproxy(), reason="HAProxy's wheel is not installed")
STOPPED_HAPROXY_S = 5.0
"""Maximum seconds until a stopped HAProxy is replaced."""
KILLED_GUARD_S = 2.0
"""Maximum seconds until a killed guard and its HAProxy are replaced."""
LOST = (OSError, asyncio.IncompleteReadError)


def processes(directory: Path, name: str = "") -> list[int]:
    """HAProxies and guards of a fleet, or those of this name."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_named = name in ("", (entry / "comm").read_text().strip())
            arguments = (entry / "cmdline").read_bytes()
            if is_named and str(directory).encode() in arguments and b"-db" in arguments:
                found.append(int(entry.name))
    return found


def owners(directory: Path) -> set[int]:
    """Guards that have files, running or not."""
    return {int(path.stem) for path in directory.glob("haproxy/[0-9]*.cfg")}


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.05)  # reading all processes takes some milliseconds


async def answer(port: int) -> str:
    """Name of the gateway that answers a request on a new connection; empty if none does."""
    with contextlib.suppress(*LOST):
        connection = await asyncio.open_connection(HOST, port)
        try:
            return (await get(connection))[1]
        finally:
            connection[1].close()
    return ""


async def wait_answer(port: int, name: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await answer(port) != name:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def asking(port: int) -> AsyncIterator[list[str]]:
    """Sends requests continuously; collects who answered."""
    answers: list[str] = []

    async def ask_on() -> None:
        while True:
            answers.append(await answer(port))
            await asyncio.sleep(0.005)

    task = asyncio.create_task(ask_on())
    try:
        yield answers
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def gateways(*names: str) -> list[Gateway]:
    started = [Gateway(name) for name in names]
    for gateway in started:
        await gateway.start()
    return started


@dataclass
class Node:
    """A Ray node, as far as HAProxy depends on it."""

    directory: Path
    raylet: subprocess.Popen[bytes]
    settings: dict[str, str] = field(default_factory=dict)
    managers: list[Manager] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.settings["port"])

    @property
    def haproxies(self) -> list[int]:
        return processes(self.directory, "haproxy")

    @property
    def guard(self) -> int:
        """Process id of HAProxy's only parent."""
        (haproxy,) = self.haproxies
        return psutil.Process(haproxy).ppid()

    @property
    def guard_parent(self) -> int:
        """Process that Serve started."""
        return psutil.Process(self.guard).ppid()

    async def manager(self, *known: Gateway) -> Manager:
        """Starts with a configuration without gateways, then adds these."""
        manager = Manager(self.settings, self.raylet.pid)
        self.managers.append(manager)
        await manager.apply()
        if known:
            await manager.apply(*known)
        return manager


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    directory = private_directory()
    with subprocess.Popen(["sleep", "1000"]) as raylet:
        node = Node(directory, raylet, settings_of(directory))
        try:
            yield node
        finally:
            raylet.kill()
            for manager in node.managers:
                await manager.kill()
    try:
        await until(lambda: not processes(directory))
    finally:
        for pid in processes(directory):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory)


async def test_killed_haproxy_is_back_with_what_it_knew(proxy: Proxy, fallback: Gateway) -> None:
    old, new = await gateways("old", "new")
    await proxy.start(old)
    for _ in range(3):
        await wait_answer(proxy.port, "old")
        (killed,) = processes(proxy.directory, "haproxy")
        os.kill(killed, signal.SIGKILL)
        await until(lambda killed=killed: killed not in processes(proxy.directory))
    await wait_answer(proxy.port, "old")
    # Serve still treats it as the process that it started.
    await proxy.reload(new)
    await proxy.wait_old_ended()
    assert await answer(proxy.port) == "new"
    assert len(processes(proxy.directory, "haproxy")) == 1


async def test_stopped_haproxy_is_replaced(node: Node) -> None:
    (gateway,) = await gateways("gateway")
    await node.manager(gateway)
    for _ in range(2):
        await wait_answer(node.port, "gateway")
        (stopped,) = node.haproxies
        began = time.monotonic()
        os.kill(stopped, signal.SIGSTOP)
        asking = [
            asyncio.create_task(get_from_serve(node)) for _ in range(3)
        ]  # they must not delay it
        await until(lambda stopped=stopped: stopped not in node.haproxies)
        await wait_answer(node.port, "gateway")
        assert time.monotonic() - began < STOPPED_HAPROXY_S
        await asyncio.gather(*asking)


async def get_from_serve(node: Node) -> None:
    """Sends a command of Serve to the admin socket."""
    path = node.directory / "haproxy" / "admin.sock"
    await asyncio.to_thread(guard_query, path, b"show stat")


async def test_a_stopped_guard_does_not_take_its_haproxy_for_stopped(node: Node) -> None:
    (gateway,) = await gateways("gateway")
    await node.manager(gateway)
    (haproxy,) = node.haproxies
    guard = node.guard
    for pid in (guard, haproxy):
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(HUNG_S + 2 * CHECK_PERIOD_S)  # as on a suspended machine
    os.kill(guard, signal.SIGCONT)
    await asyncio.sleep(CHECK_PERIOD_S)
    os.kill(haproxy, signal.SIGCONT)
    await wait_answer(node.port, "gateway")
    await asyncio.sleep(HUNG_S)
    assert node.haproxies == [haproxy]


async def test_a_stopped_replica_of_the_node_is_killed(node: Node) -> None:
    node.raylet.kill()
    script = "exec -a ray::ServeReplica:a sleep 1000 & exec -a ray::Rank0:b sleep 1000 & wait"
    node.raylet = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    raylet = psutil.Process(node.raylet.pid)
    try:
        (gateway,) = await gateways("gateway")
        await node.manager(gateway)
        replica, rank = sorted(raylet.children(), key=lambda child: child.pid)
        began = time.monotonic()
        for child in (replica, rank):
            child.suspend()
        await until(lambda: replica not in raylet.children())
        assert STOPPED_S <= time.monotonic() - began < STOPPED_S + 3 * CHECK_PERIOD_S
        assert rank.status() == psutil.STATUS_STOPPED
        assert await answer(node.port) == "gateway"
    finally:
        os.killpg(node.raylet.pid, signal.SIGKILL)
        node.raylet.wait()


async def test_serve_may_change_what_does_not_come_back(proxy: Proxy) -> None:
    """If another process has taken the port, the guard keeps trying, and loads the next
    configuration."""
    old, new = await gateways("old", "new")
    await proxy.start(old)
    (killed,) = processes(proxy.directory, "haproxy")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(killed, signal.SIGKILL)
        await take_port(other, proxy.port)
        logs = list(proxy.directory.glob("haproxy/*.stderr.log"))
        await until(lambda: sum(log.read_text().count("restarting in") for log in logs) > 3)
    await proxy.reload(new)
    await wait_answer(proxy.port, "new")
    await proxy.wait_old_ended()


async def take_port(listener: socket.socket, port: int) -> None:
    """Takes the port during one of the restarts of HAProxy."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(OSError):
                listener.bind((HOST, port))
                listener.listen()
                return
            await asyncio.sleep(0)


async def test_a_configuration_that_cannot_be_loaded_is_reported(proxy: Proxy) -> None:
    (gateway,) = await gateways("gateway")
    await proxy.start(gateway)
    proxy.config.retry_on = "nonsense"
    with pytest.raises(RuntimeError, match="nonsense"):
        await proxy.reload(gateway)
    assert await answer(proxy.port) == "gateway"
    proxy.config.retry_on = "conn-failure"
    await proxy.reload(gateway)
    await proxy.wait_old_ended()
    assert await answer(proxy.port) == "gateway"


async def test_no_request_fails_while_the_manager_is_replaced(node: Node) -> None:
    old, new = await gateways("old", "new")
    manager = await node.manager(old)
    stream = asyncio.create_task(get(await asyncio.open_connection(HOST, node.port), "/wait"))
    await until(lambda: old.num_waiting == 1)
    async with asking(node.port) as answers:
        await manager.kill()
        begin = len(answers)
        await until(lambda: len(answers) > begin + 20)
        successor = await node.manager()
        begin = len(answers)
        await until(lambda: len(answers) > begin + 20)
        assert set(answers) == {"old"}
        await successor.apply(new)
        begin = len(answers)
        await until(lambda: answers[begin:].count("new") > 20)
    assert set(answers) == {"old", "new"}
    assert answers == sorted(answers, reverse=True)
    # Open requests finish on the old HAProxy, which then ends.
    assert len(node.haproxies) == 2
    old.go_on.set()
    assert (await stream)[:2] == (200, "old")
    await until(lambda: len(node.haproxies) == 1)
    assert await answer(node.port) == "new"


async def test_managers_may_be_killed_one_after_another(node: Node) -> None:
    first, last = await gateways("first", "last")
    for _ in range(3):
        manager = await node.manager(*([] if node.managers else [first]))
        await wait_answer(node.port, "first")
        await manager.kill()
    (haproxy,) = node.haproxies
    os.kill(haproxy, signal.SIGKILL)
    await wait_answer(node.port, "first")
    manager = await node.manager(last)
    await wait_answer(node.port, "last")
    await until(lambda: len(processes(node.directory)) == 3)
    await until(lambda: owners(node.directory) == {node.guard, node.guard_parent})


@pytest.mark.parametrize(
    "when",
    [
        "managed",
        pytest.param("orphaned", marks=pytest.mark.long),
        "adopted",
        pytest.param("draining", marks=pytest.mark.long),
    ],
)
async def test_nothing_survives_the_fleet(node: Node, when: str) -> None:
    (gateway,) = await gateways("gateway")
    manager = await node.manager(gateway)
    await wait_answer(node.port, "gateway")
    if when == "draining":
        request = asyncio.create_task(get(await asyncio.open_connection(HOST, node.port), "/wait"))
        await until(lambda: gateway.num_waiting == 1)
        await manager.apply(gateway)
        assert len(node.haproxies) == 2
        request.cancel()
    if when != "managed":
        await manager.kill()
    if when == "adopted":
        await node.manager()
    assert await answer(node.port) == "gateway"
    node.raylet.kill()
    await until(lambda: not processes(node.directory))
    assert await answer(node.port) == ""


@pytest.mark.parametrize("is_adopted", [False, True])
async def test_serve_stops_what_a_killed_manager_left(node: Node, is_adopted: bool) -> None:
    (gateway,) = await gateways("gateway")
    manager = await node.manager(gateway)
    if is_adopted:
        await manager.kill()
        manager = await node.manager()
    assert await answer(node.port) == "gateway"
    await manager.stop()
    await until(lambda: not processes(node.directory))


async def test_without_a_raylet_it_ends_with_its_parent(node: Node) -> None:
    (gateway,) = await gateways("gateway")
    manager = Manager(node.settings, raylet=None)
    node.managers.append(manager)
    await manager.apply(gateway)
    assert await answer(node.port) == "gateway"
    await manager.kill()
    await until(lambda: not processes(node.directory))


async def test_killed_guard_is_restarted(node: Node) -> None:
    old, new = await gateways("old", "new")
    manager = await node.manager(old)
    parent = node.guard_parent
    for _ in range(2):
        await wait_answer(node.port, "old")
        (haproxy,) = node.haproxies
        began = time.monotonic()
        os.kill(node.guard, signal.SIGKILL)
        await wait_gone(node, haproxy)
        await wait_answer(node.port, "old")
        assert time.monotonic() - began < KILLED_GUARD_S
    # Serve still treats it as the process that it started.
    await wait_for_guard(node, parent)
    await manager.apply(new)
    await wait_answer(node.port, "new")
    await until(lambda: owners(node.directory) == {node.guard, node.guard_parent})
    assert parent not in processes(node.directory)
    assert manager.is_alive


async def wait_gone(node: Node, haproxy: int) -> None:
    await until(lambda: haproxy not in node.haproxies)


async def wait_for_guard(node: Node, parent: int) -> None:
    """Waits until a guard with this parent responds at the admin socket."""
    path = node.directory / "haproxy" / "admin.sock"
    async with asyncio.timeout(DEADLINE_S):
        while process_id(await asyncio.to_thread(guard_query, path, b"show info")) != parent:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("is_adopted", [pytest.param(False, marks=pytest.mark.long), True])
async def test_no_request_fails_when_the_guard_s_parent_is_killed(
    node: Node, is_adopted: bool
) -> None:
    old, new = await gateways("old", "new")
    manager = await node.manager(old)
    parent = node.guard_parent
    if is_adopted:
        await manager.kill()
        manager = await node.manager()
        newest = max(set(processes(node.directory)) - {node.guard, *node.haproxies})
        parent = psutil.Process(newest).ppid()
    (haproxy,) = node.haproxies
    stream = asyncio.create_task(get(await asyncio.open_connection(HOST, node.port), "/wait"))
    await until(lambda: old.num_waiting == 1)
    async with asking(node.port) as answers:
        os.kill(parent, signal.SIGKILL)
        # Serve's manager can no longer use HAProxy, so Serve starts another manager.
        await until(lambda: not manager.is_alive)
        assert node.haproxies == [haproxy]
        successor = await node.manager()
        await successor.apply(new)
        begin = len(answers)
        await until(lambda: answers[begin:].count("new") > 20)
    assert set(answers) == {"old", "new"}
    old.go_on.set()
    assert (await stream)[:2] == (200, "old")
    await until(lambda: len(processes(node.directory)) == 3)
    await until(lambda: owners(node.directory) == {node.guard, node.guard_parent})


async def test_a_guard_killed_without_a_manager_ends_all_and_the_next_begins_anew(
    node: Node,
) -> None:
    (gateway,) = await gateways("gateway")
    manager = await node.manager(gateway)
    guard = node.guard
    await manager.kill()
    os.kill(guard, signal.SIGKILL)
    await until(lambda: not processes(node.directory))
    await node.manager(gateway)
    assert await answer(node.port) == "gateway"
    assert guard not in owners(node.directory)
    await until(lambda: owners(node.directory) == {node.guard, node.guard_parent})


def test_who_was_before_is_the_guard_s_to_know() -> None:
    options, old = split_arguments(["-db", "-f", "c", "-dR", "-sf", "1", "22", "-x", "/a.sock"])
    assert options == ["-db", "-f", "c", "-dR"]
    assert old == [1, 22]
    assert split_arguments(["-f", "7"]) == (["-f", "7"], [])


def test_output_of_haproxy_is_read() -> None:
    assert process_id(b"Name: HAProxy\nPid: 17\nNodePid: 3\n") == 17
    assert process_id(b"") is None
    assert has_routes("frontend f\n    use_backend app if is_app\n")
    assert not has_routes("    # and static use_backend selection below\n")
