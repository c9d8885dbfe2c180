"""Metrics of a node: one scrape for all its processes.

Each process answers for itself on a Unix socket in a directory that they share. The process that is
scraped asks the others and merges the answers; one that has ended does not answer, and its series
end with it. Where a port is configured, the first process to get it holds it, and another takes it
over when that one ends:

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
"""Seconds for a process to answer; one that takes longer is left out of the scrape."""
RETRY_S = 1.0
"""Seconds between two attempts to get the port while another process holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMetricsConfig:
    """Configuration of a node's metrics."""

    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = 0
    """Port on which each node answers for all its processes; 0 for none."""
    vllm_names: bool = False
    """Whether workers report the model server protocol's metrics under vLLM's names, too."""


class NodeMetrics:
    """This process's part of its node's metrics. Lives on one event loop.

    Args:
        process: name of the process.
        own: renders its own metrics in the content type that it is given.
        directory: folder that the processes of this node share; made with mode 0700 if missing.
        config: where to listen; None for no port.
        watch_loop: whether to report the lag of this process's event loop.
    """

    def __init__(
        self,
        process: str,
        own: Callable[[str], bytes],
        directory: str,
        config: NodeMetricsConfig | None = None,
        *,
        watch_loop: bool = True,
    ) -> None:
        self._process = process
        self._own = own
        self._directory = Path(directory)
        self._config = config or NodeMetricsConfig()
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._server: asyncio.AbstractServer | None = None
        self._port_task: asyncio.Task[None] | None = None
        self._lag = LoopLag() if watch_loop else None
        self._lag_task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begins to answer. A failure is logged, and serving continues without."""
        if self._lag is not None:
            self._lag_task = asyncio.create_task(self._lag.watch())
        path = self._directory / self._name
        try:
            _make_private(self._directory)
            self._server = await asyncio.start_unix_server(self._answer, str(path))
        except OSError:
            logger.exception("metrics of this process are served by itself alone")
        if self._config.port:
            self._port_task = asyncio.create_task(self._hold_port())

    def close(self) -> None:
        """Stops answering."""
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
        answers = await asyncio.gather(*(self._ask(path, content_type) for path in others))
        texts = [answer for answer in answers if answer is not None]
        num_silent = sum(answer == b"" for answer in answers)
        own = self._render(content_type)
        node = render([_processes(len(texts) - num_silent + 1, num_silent)], content_type)
        return merge([own, *texts, node], content_type), content_type

    def _render(self, content_type: str) -> bytes:
        lag = None if self._lag is None else self._lag.histogram
        process = render(process_metrics(self._process, lag), content_type)
        return merge([self._own(content_type), process], content_type)

    async def _ask(self, path: Path, content_type: str) -> bytes | None:
        """Another process's metrics; empty where it does not answer, None where it has ended."""
        writer = None
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(str(path))
                writer.write(content_type.encode() + b"\n")
                return await reader.read(-1)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(OSError):  # no process listens there any more
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
            pass  # the process that asked is gone
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
                logger.info("metrics of this node on %s:%d", host, port)
                await asyncio.Event().wait()
            except OSError:
                await asyncio.sleep(RETRY_S)  # another process of this node has it
            finally:
                await runner.cleanup()

    async def _scrape(self, request: web.Request) -> web.Response:
        from aiohttp import web

        body, content_type = await self.gather(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})


def _processes(num_answered: int, num_silent: int) -> Metric:
    processes = GaugeMetricFamily(
        "rayfleet_node_processes",
        "Processes of this node, by whether they answered this scrape.",
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
        raise PermissionError(f"{directory} is not a directory of this user alone")
