"""Clients that stream completions during an event such as a rolling update."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Self

import uvloop

from cluster.bench.client import Record, Request, completion_request, open_session, send

_SHARE_LONG = 0.25
"""Fraction of the clients whose requests are all long streams."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """Number of clients, and their requests."""

    num_clients: int = 16
    """Number of concurrent clients; each sends its next request after the previous answer."""
    num_idle_clients: int = 4
    """Number of clients that send one request at the start and one at the end, over a connection
    that is idle in between."""
    output_len: int = 16
    """Output tokens per short request."""
    long_output_len: int = 600
    """Output tokens per long request."""
    pause_s: float = 0.0
    """Seconds for which a client waits before its next request."""

    def __post_init__(self) -> None:
        if self.num_clients < 2:
            raise ValueError("--num-clients must be at least 2")
        if self.pause_s < 0.0:
            raise ValueError(f"--pause-s must not be negative, got {self.pause_s}")


class ClientLoad:
    """Clients in a thread, from construction until `stop` or the end of the `with` block.

    Args:
        base_url: URL of the endpoint.
        options: number of clients, and their requests.
        model: served model name.
        headers: headers of each request.
    """

    def __init__(
        self,
        base_url: str,
        options: ClientOptions,
        model: str,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.records: list[Record] = []
        self._url = f"{base_url}/v1/completions"
        self._options = options
        self._headers = headers or {}
        self._model = model
        self._num_sent = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the clients, which would otherwise affect later tests."""
        self.stop()

    def wait_for(self, count: int) -> None:
        """Waits until `count` more requests have ended."""
        num_expected = len(self.records) + count
        while len(self.records) < num_expected and self._thread.is_alive():
            time.sleep(0.02)

    def stop(self) -> list[Record]:
        """Stops once every client has received its last answer; returns all records."""
        self._stopping.set()
        self._thread.join()
        return self.records

    async def _run(self) -> None:
        num_long = max(1, round(_SHARE_LONG * self._options.num_clients))
        async with asyncio.TaskGroup() as group:
            for number in range(self._options.num_clients):
                group.create_task(self._send_requests(is_long=number < num_long))
            for _ in range(self._options.num_idle_clients):
                group.create_task(self._send_twice())

    async def _send_requests(self, *, is_long: bool) -> None:
        length = self._options.long_output_len if is_long else self._options.output_len
        async with open_session(self._headers) as session:
            while not self._stopping.is_set():
                self.records.append(await send(session, self._url, self._request(length)))
                await asyncio.sleep(self._options.pause_s)

    async def _send_twice(self) -> None:
        async with open_session(self._headers, keepalive_s=600.0) as session:
            request = self._request(self._options.output_len)
            self.records.append(await send(session, self._url, request))
            while not self._stopping.is_set():
                await asyncio.sleep(0.05)
            request = self._request(self._options.output_len)
            self.records.append(await send(session, self._url, request))

    def _request(self, output_len: int) -> Request:
        self._num_sent += 1
        prompt = f"{self._num_sent}: a prompt of its own"
        return completion_request(self._num_sent, self._model, prompt, output_len)
