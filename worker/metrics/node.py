"""Node metrics: one scrape for all processes of a node.

Each process serves its metrics on a Unix socket in a shared directory. The scraped process queries
the others and merges the results; series of a process end when it exits. If a port is configured,
the first process that can bind it serves the metrics there, and another one takes over when that
process exits:

    Prometheus ──HTTP──> process with the port ──┬── own metrics
                                                 ├──> socket of a gateway
                                                 └──> socket of a worker's frontend
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric

from worker.metrics.process import LoopLag, process_metrics
from worker.protocol.exposition import content_type_for, merge, render

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

ANSWER_S = 3.0
"""Timeout in seconds for a process to answer, after which it is omitted from the scrape."""
RETRY_S = 1.0
"""Seconds between attempts to bind the port while another process has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMetricsConfig:
    """Configuration of a node's metrics."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port on which each node serves the metrics of all its processes; 0 disables it."""
    vllm_names: bool = False
    """Whether workers also export the model server protocol's metrics under vLLM's names."""


class NodeMetrics:
    """This process's part of its node's metrics. For use on one event loop.

    Args:
        process: name of the process.
        render_metrics: renders the metrics of this process for a content type.
        directory: folder shared by the processes of this node; created with mode 0700 if missing.
        config: where to listen; None if no port is configured.
        watch_loop: whether to export the lag of this process's event loop.
    """

    def __init__(
        self,
        process: str,
        render_metrics: Callable[[str], bytes],
        directory: str,
        config: NodeMetricsConfig | None = None,
        *,
        watch_loop: bool = True,
    ) -> None:
        self._process = process
        self._render_metrics = render_metrics
        self._directory = Path(directory)
        self._config = config or NodeMetricsConfig()
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._server: asyncio.AbstractServer | None = None
        self._port_task: asyncio.Task[None] | None = None
        self._lag = LoopLag() if watch_loop else None
        self._lag_task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Starts listening. If that fails, logs the error and continues without serving metrics."""
        if self._lag is not None:
            self._lag_task = asyncio.create_task(self._lag.watch())
        path = self._directory / self._name
        try:
            _make_private(self._directory)
            self._server = await asyncio.start_unix_server(self._answer, str(path))
        except OSError:
            logger.exception("metrics of this process are not available to other processes")
        if self._config.port:
            self._port_task = asyncio.create_task(self._hold_port())

    def close(self) -> None:
        """Stops listening."""
        for task in (self._lag_task, self._port_task):
            if task is not None:
                task.cancel()
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(OSError):
                (self._directory / self._name).unlink()

    async def gather(self, accept: str = "") -> tuple[bytes, str]:
        """Metrics of all processes of this node, and their content type.

        Args:
            accept: the scraper's Accept header.
        """
        content_type = content_type_for(accept)
        others: list[Path] = []
        if self._server is not None:
            others = [path for path in self._directory.iterdir() if path.name != self._name]
        answers = await asyncio.gather(*(self._fetch(path, content_type) for path in others))
        texts = [answer for answer in answers if answer is not None]
        num_silent = sum(answer == b"" for answer in answers)
        local = self._render(content_type)
        node = render([_processes(len(texts) - num_silent + 1, num_silent)], content_type)
        return merge([local, *texts, node], content_type), content_type

    def _render(self, content_type: str) -> bytes:
        lag = None if self._lag is None else self._lag.histogram
        process = render(process_metrics(self._process, lag), content_type)
        return merge([self._render_metrics(content_type), process], content_type)

    async def _fetch(self, path: Path, content_type: str) -> bytes | None:
        """Metrics of another process; empty if it does not respond, None if it has exited."""
        writer = None
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(str(path))
                writer.write(content_type.encode() + b"\n")
                return await reader.read(-1)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(OSError):  # no process listens there anymore
                path.unlink()
            return None
        except (OSError, TimeoutError) as error:
            logger.warning("metrics of process %s are missing: %r", path.name, error)
            return b""
        finally:
            if writer is not None:
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                content_type = (await reader.readline()).decode().strip()
                writer.write(self._render(content_type))
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # the scraping process has exited
        finally:
            writer.close()

    async def _hold_port(self) -> None:
        from aiohttp import web

        application = web.Application()
        application.router.add_get("/metrics", self._scrape)
        host, port = self._config.host, self._config.port
        while True:
            runner = web.AppRunner(application, access_log=None)
            try:
                await runner.setup()
                await web.TCPSite(runner, host, port).start()
                logger.info("serving metrics of this node on %s:%d", host, port)
                await asyncio.Event().wait()
            except OSError:
                await asyncio.sleep(RETRY_S)  # another process of this node has the port
            finally:
                await runner.cleanup()

    async def _scrape(self, request: web.Request) -> web.Response:
        from aiohttp import web

        body, content_type = await self.gather(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})


def _processes(num_answered: int, num_silent: int) -> Metric:
    processes = GaugeMetricFamily(
        "rayfleet_node_processes",
        "Processes of this node, by whether they responded to this scrape.",
        labels=["state"],
    )
    processes.add_metric(["answered"], num_answered)
    processes.add_metric(["silent"], num_silent)
    return processes


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not mine or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"{directory} must be a directory that only this user can access: remove it, or run "
            "chmod 700 on it"
        )
