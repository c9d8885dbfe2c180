"""Well-behaved clients that run while hostile clients do, and the times of their tokens.

They run in a separate process, so that the campaign's work does not delay them:

    python -m tests.campaigns.hostile.bystanders URL MODEL NUM_STREAMS   (key in the environment)
"""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from types import TracebackType
from typing import BinaryIO, Self

import aiohttp

from cluster.bench.sse import EventScanner, has_choices
from tests.campaigns.hostile.clients import open_session

KEY = "RAYFLEET_BYSTANDERS_KEY"
_RECORD = struct.Struct("<Bd")
"""Number of a stream and time of a token, on the monotonic clock, which all processes share. The
time is negative for the first token of a response, and 0 for a failed response."""
_NUM_TOKENS = 2000
_PAUSE_S = 0.5
"""Pause in seconds after a failure."""


class Bystanders:
    """Continuous streams until the end of the `with` block.

    Args:
        base_url: URL of the fleet.
        model: served model name.
        api_key: API key of the clients.
        num_streams: number of concurrent streams.
    """

    def __init__(self, base_url: str, model: str, api_key: str, num_streams: int = 2) -> None:
        self.tokens = [Tokens() for _ in range(num_streams)]
        self.num_failed = 0
        command = [sys.executable, "-m", "tests.campaigns.hostile.bystanders"]
        self._process = subprocess.Popen(
            [*command, base_url, model, str(num_streams)],
            stdout=subprocess.PIPE,
            env={**os.environ, KEY: api_key},
        )
        assert self._process.stdout is not None
        self._thread = threading.Thread(
            target=self._read, args=(self._process.stdout,), daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()

    def wait_tokens(self, after: float, timeout_s: float) -> bool:
        """Whether each stream received a token after `after`, within the timeout."""
        deadline = time.monotonic() + timeout_s
        while any(tokens.last <= after for tokens in self.tokens):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def longest_gap(self, since: float, until: float) -> float:
        """Longest time in seconds between two tokens of a response, among gaps that overlap the
        interval."""
        return max(tokens.longest_gap(since, until) for tokens in self.tokens)

    def num_tokens(self, since: float, until: float) -> int:
        """Number of tokens over all streams."""
        return sum(tokens.number(since, until) for tokens in self.tokens)

    def _read(self, pipe: BinaryIO) -> None:
        while record := pipe.read(_RECORD.size):
            if len(record) < _RECORD.size:
                return
            stream, at = _RECORD.unpack(record)
            if at:
                self.tokens[stream].add(abs(at), is_first=at < 0)
            else:
                self.num_failed += 1


class Tokens:
    """Times of one stream's tokens."""

    def __init__(self) -> None:
        self._times = array("d")
        self._first = array("b")

    @property
    def last(self) -> float:
        """Time of the last token; 0 if there is none."""
        return self._times[-1] if self._times else 0.0

    def add(self, at: float, *, is_first: bool) -> None:
        """Adds a token, which may be the first of a response."""
        self._first.append(is_first)
        self._times.append(at)

    def number(self, since: float, until: float) -> int:
        """Number of tokens in an interval."""
        return bisect_right(self._times, until) - bisect_left(self._times, since)

    def longest_gap(self, since: float, until: float) -> float:
        """Longest gap between two tokens of the same response that overlaps the interval."""
        begin = max(bisect_left(self._times, since), 1)
        end = min(bisect_right(self._times, until) + 1, len(self._times))
        gaps = (
            self._times[place] - self._times[place - 1]
            for place in range(begin, end)
            if not self._first[place]
        )
        return max(gaps, default=0.0)


def main(arguments: Sequence[str]) -> None:
    """Streams until killed."""
    base_url, model, num_streams = arguments
    asyncio.run(_stream_all(base_url, model, int(num_streams)))


async def _stream_all(base_url: str, model: str, num_streams: int) -> None:
    async with open_session(os.environ[KEY]) as session, asyncio.TaskGroup() as group:
        for number in range(num_streams):
            group.create_task(_stream_on(session, base_url, model, number))


async def _stream_on(
    session: aiohttp.ClientSession, base_url: str, model: str, number: int
) -> None:
    body = {
        "model": model,
        "prompt": f"{number}: go on",
        # Staggered lengths: one stream is mid-response while the other starts.
        "max_tokens": _NUM_TOKENS + 700 * number,
        "stream": True,
        "ignore_eos": True,
        # One event per token, even if it has no text.
        "return_token_ids": True,
        # Highest priority, because the measurement is about stalls, not queueing.
        "priority": 9,
    }
    while True:
        try:
            async with session.post(f"{base_url}/v1/completions", json=body) as response:
                response.raise_for_status()
                is_whole = await _read_response(response, number)
        except (aiohttp.ClientError, OSError):
            is_whole = False
        if not is_whole:
            _write(_RECORD.pack(number, 0.0))
            await asyncio.sleep(_PAUSE_S)


async def _read_response(response: aiohttp.ClientResponse, number: int) -> bool:
    scanner, is_first, data = EventScanner(), True, b""
    async for part in response.content.iter_any():
        now = time.monotonic()
        records = b""
        for data in scanner.feed(part):
            if has_choices(data):
                records += _RECORD.pack(number, -now if is_first else now)
                is_first = False
        if records:
            _write(records)
    return data == b"[DONE]" and not is_first


def _write(records: bytes) -> None:
    sys.stdout.buffer.write(records)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
