"""Load client: sends streamed requests to an OpenAI-compatible endpoint and measures the times of
their events.

As in vLLM's serving benchmark, each event with choices is counted, with or without text (a token
may be half a character), and the latency ends with the last one. Unlike in vLLM, the first chunk of
a chat, which has a role but no text, does not end the time to first token.

aiohttp on uvloop takes about 20 µs per streamed event, compared to 70 to 80 µs for httpx (32
streams). Only events without text, and those with usage, are decoded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from cluster.bench.sse import EventScanner, has_choices, has_text, has_usage, opens_chat

_READ_TIMEOUT_S = 600.0
_MAX_CHARS = 500
"""Maximum length of an error message in characters."""
_IDLE_S = 2.0
"""Keep-alive of idle connections in seconds, less than that of servers (uvicorn: 5 s), so that no
request is sent on a closing socket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request to send."""

    index: int
    """Index of the request within its load."""
    body: bytes
    """Body of the POST, as JSON."""
    prompt_len: int
    """Prompt tokens as counted by the client, overridden by the server's usage."""
    output_len: int
    """Maximum number of tokens to generate."""
    arrival_s: float = 0.0
    """Seconds from the start of the load to sending, or from the end of `after` if set."""
    after: int | None = None
    """Index of the request in the same Load that must finish before this one is sent; None if there
    is none."""
    headers: Mapping[str, str] | None = None
    """Headers in addition to those of the HTTP session."""
    keep_text: bool = False
    """Whether the record keeps the text of the response."""
    is_streamed: bool = True
    """Whether the response is a stream of events; otherwise it is one JSON object."""


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
    """Request for a greedy streamed completion of exactly `output_len` tokens; other `fields` are
    added to the body."""
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
    """Outcome of one request. Times are in seconds."""

    index: int
    prompt_len: int
    requested_len: int
    """Number of requested output tokens."""
    start: float = 0.0
    """Send time by `time.perf_counter`, a clock that all processes of a machine share."""
    latency: float = 0.0
    """Seconds to the last event with choices or, for a failed request, to the failure."""
    ttft: float = 0.0
    """Seconds to the first event with choices, not counting a chat's first event, which has a role
    but no text."""
    itl: list[float] = field(default_factory=list)
    """Intervals between events with choices."""
    output_len: int = 0
    """Number of generated tokens."""
    cached_tokens: int = 0
    """Prompt tokens found in the server's prefix cache."""
    usage_seen: bool = False
    """Whether lengths are from the server's usage; otherwise `output_len` counts text events."""
    worker: str = ""
    """Worker ID from the header x-rayfleet-worker; empty if it is missing."""
    status: int = 0
    """HTTP status; 0 if there was no response."""
    retry_after: str = ""
    """Header Retry-After; empty if it is missing."""
    error: str = ""
    """Reason for the failure; empty for a completed request."""
    text: str = ""
    """Content of the response's message, if the request keeps it."""

    def read_usage(self, usage: dict[str, Any]) -> None:
        """Sets the token counts from the server's `usage`."""
        self.usage_seen = True
        self.prompt_len = usage["prompt_tokens"]
        self.output_len = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens") or 0


def open_session(headers: dict[str, str], keepalive_s: float = _IDLE_S) -> aiohttp.ClientSession:
    """A session without cookies, connection limit or total timeout."""
    return aiohttp.ClientSession(
        headers={"Content-Type": "application/json", **headers},
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive_s),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=_READ_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def send(session: aiohttp.ClientSession, url: str, request: Request) -> Record:
    """Sends one request and reads the response to the end; a failure is recorded as `error`."""
    record = Record(
        index=request.index, prompt_len=request.prompt_len, requested_len=request.output_len
    )
    record.start = time.perf_counter()
    try:
        async with session.post(url, data=request.body, headers=request.headers) as response:
            record.status = response.status
            record.retry_after = response.headers.get("Retry-After", "")
            record.worker = response.headers.get("x-rayfleet-worker", "")
            if response.status != 200:
                record.error = f"HTTP {response.status}: {_message(await response.text())}"
            elif request.is_streamed:
                await _read_stream(response, record, keep_text=request.keep_text)
            else:
                await _read_whole(response, record)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.latency = record.latency or time.perf_counter() - record.start
    return record


def _message(body: str) -> str:
    """Message of an error response: OpenAI's `error.message`, FastAPI's `detail`, or the whole
    body."""
    try:
        response = json.loads(body)
        error = response.get("error") or response.get("detail") or response.get("message")
        text = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = None
    return (text if text and isinstance(text, str) else body)[:_MAX_CHARS]


class _StreamReader:
    """Fills a record from the events of one stream."""

    def __init__(self, record: Record, *, keep_text: bool) -> None:
        self._record = record
        self._texts: list[str] | None = [] if keep_text else None
        self._last = 0.0
        self._num_text_events = 0
        self.done = False

    def event(self, data: bytes, now: float) -> None:
        """Counts one event that arrived at `now`."""
        if data == b"[DONE]":
            self.done = True
            return
        if has_choices(data) and (self._last or not opens_chat(data)):
            self._count(now)
        if not has_text(data):
            self._decode(data)
            return
        self._num_text_events += 1
        if self._texts is not None:
            delta = json.loads(data)["choices"][0].get("delta", {})
            self._texts.append(delta.get("content") or "")
        if has_usage(data):
            self._record.read_usage(json.loads(data)["usage"])

    def finish(self) -> None:
        """Completes the record; a stream without [DONE] at its end is an error."""
        record = self._record
        if not self.done and not record.error:
            record.error = "the stream ended without [DONE]"
        if self._last and not record.error:
            record.latency = self._last - record.start
        record.text = "".join(self._texts or ())
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
            self._record.read_usage(message["usage"])


async def _read_whole(response: aiohttp.ClientResponse, record: Record) -> None:
    """Fills a record from a response that is not streamed."""
    body = await response.read()
    record.ttft = record.latency = time.perf_counter() - record.start
    try:
        usage = json.loads(body).get("usage")
    except ValueError:
        record.error = f"not JSON: {body[:200].decode(errors='replace')}"
        return
    if usage:
        record.read_usage(usage)


async def _read_stream(
    response: aiohttp.ClientResponse, record: Record, *, keep_text: bool
) -> None:
    scanner = EventScanner()
    reader = _StreamReader(record, keep_text=keep_text)
    try:
        async for chunk in response.content.iter_any():
            now = time.perf_counter()
            for data in scanner.feed(chunk):
                reader.event(data, now)
    except json.JSONDecodeError as error:
        record.error = f"not JSON: {error.doc[:200]}"
    finally:
        reader.finish()
