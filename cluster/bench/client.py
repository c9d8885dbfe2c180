"""One streamed request to an OpenAI endpoint, timed.

What counts is what vLLM's serving benchmark counts: events with choices, whether they carry text
or not (a token may be half a character), up to the last of them. The chunk that opens a chat with
a role alone is no token to us; vLLM's time to the first token ends there.

aiohttp on uvloop spends about 20 µs on a streamed event where httpx spends 70 to 80 (32 streams);
besides that, only events without text are decoded.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from cluster.bench.sse import EventScanner, has_choices, has_text, has_usage, opens_chat

_READ_TIMEOUT_S = 600.0
_MOST_CHARS = 500
"""Characters that are kept of an error's text."""
_IDLE_S = 2.0
"""Seconds that an idle connection is kept: fewer than servers keep it (uvicorn: 5 s), so that no
request meets a closing socket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request ready to send."""

    index: int
    body: bytes
    """JSON."""
    prompt_len: int
    """Tokens, as far as the client knows; the server's own count wins."""
    output_len: int
    """Most tokens to generate."""
    arrival_s: float = 0.0
    """When to send it, after the start, or after the end of `after`."""
    after: int | None = None
    """Index of the request of the same client that has to end first."""


def completion_request(
    index: int,
    model: str,
    prompt: str | list[int],
    output_len: int,
    *,
    arrival_s: float = 0.0,
    after: int | None = None,
    **fields: Any,
) -> Request:
    """A greedy streamed completion of exactly `output_len` tokens; `fields` are further ones."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    return Request(
        index=index,
        body=json.dumps(body).encode(),
        prompt_len=0 if isinstance(prompt, str) else len(prompt),
        output_len=output_len,
        arrival_s=arrival_s,
        after=after,
    )


@dataclass(kw_only=True, slots=True)
class Record:
    """The outcome of one request. Times in seconds; `start` on the machine's monotonic clock."""

    index: int
    prompt_len: int
    wanted_len: int
    start: float = 0.0
    latency: float = 0.0
    """Seconds to the last event with choices; of a request that failed, to its end."""
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    """Gaps between events with choices."""
    output_len: int = 0
    cached_tokens: int = 0
    usage_seen: bool = False
    """Whether lengths are the server's counts; else `output_len` counts events."""
    worker: str = ""
    """Which worker served, where the server says so."""
    status: int = 0
    """HTTP status; 0 where no answer came."""
    retry_after: str = ""
    """The header, where there is one."""
    error: str = ""
    """Empty for a request that completed."""


def open_session(headers: dict[str, str], keepalive_s: float = _IDLE_S) -> aiohttp.ClientSession:
    """A session without limits on connections, cookies or total time."""
    return aiohttp.ClientSession(
        headers={"Content-Type": "application/json", **headers},
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive_s),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=_READ_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def send(session: aiohttp.ClientSession, url: str, request: Request) -> Record:
    """Sends one request and reads its stream to the end; errors end up in the record."""
    record = Record(
        index=request.index, prompt_len=request.prompt_len, wanted_len=request.output_len
    )
    record.start = time.perf_counter()
    try:
        async with session.post(url, data=request.body) as response:
            record.status = response.status
            record.retry_after = response.headers.get("Retry-After", "")
            record.worker = response.headers.get("x-rayfleet-worker", "")
            if response.status != 200:
                record.error = f"HTTP {response.status}: {_message(await response.text())}"
            else:
                await _read_stream(response, record)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.latency = record.latency or time.perf_counter() - record.start
    return record


def _message(body: str) -> str:
    """The message of an error answer: OpenAI's `error.message`, FastAPI's `detail`, or all of
    it."""
    try:
        answer = json.loads(body)
        said = answer.get("error") or answer.get("detail") or answer.get("message")
        text = said.get("message") if isinstance(said, dict) else said
    except (ValueError, AttributeError):
        text = None
    return (text if text and isinstance(text, str) else body)[:_MOST_CHARS]


class _StreamReader:
    """Feeds a record from the events of one stream."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._last = 0.0
        self._num_text_events = 0
        self.done = False

    def event(self, data: bytes, now: float) -> None:
        """Takes in one event that arrived at `now`."""
        if data == b"[DONE]":
            self.done = True
            return
        if has_choices(data) and (self._last or not opens_chat(data)):
            self._count(now)
        if not has_text(data):
            self._decode(data)
            return
        self._num_text_events += 1
        if has_usage(data):
            self._take_usage(json.loads(data)["usage"])

    def finish(self) -> None:
        """Ends the record; a stream that did not say that it was done is an error."""
        record = self._record
        if not self.done and not record.error:
            record.error = "the stream ended without [DONE]"
        if self._last and not record.error:
            record.latency = self._last - record.start
        if not record.usage_seen:
            record.output_len = self._num_text_events

    def _count(self, now: float) -> None:
        if self._last:
            self._record.itl.append(now - self._last)
        else:
            self._record.ttft = now - self._record.start
        self._last = now

    def _decode(self, data: bytes) -> None:
        message = json.loads(data)
        if message.get("error"):
            self._record.error = f"error event: {_message(data.decode())}"
        if message.get("usage"):
            self._take_usage(message["usage"])

    def _take_usage(self, usage: dict[str, Any]) -> None:
        record = self._record
        record.usage_seen = True
        record.prompt_len = usage["prompt_tokens"]
        record.output_len = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens") or 0


async def _read_stream(response: aiohttp.ClientResponse, record: Record) -> None:
    scanner = EventScanner()
    reader = _StreamReader(record)
    try:
        async for chunk in response.content.iter_any():
            now = time.perf_counter()
            for data in scanner.feed(chunk):
                reader.event(data, now)
    except json.JSONDecodeError as error:
        record.error = f"not JSON: {error.doc[:200]}"
    finally:
        reader.finish()
