"""Clients that send hostile requests, and the classification of their responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import aiohttp

from cluster.bench.report import Check, exactly
from tests.campaigns.hostile.inputs import TEXT, Case
from tests.campaigns.hostile.raw import RawCase

KEPT_BYTES = 4096
"""Number of bytes to keep from the start and from the end of a response."""
ANSWER_S = 120.0
"""Timeout in seconds for any HTTP response; responses take seconds on an idle machine."""
HALF_CLOSE_S = 0.5
"""Seconds without a response after which a client half-closes its connection."""
CLOSE_S = 30.0
"""Timeout in seconds for an incomplete request to be answered or closed. HAProxy waits 10 s, or 60
s for the rest of a body that it has started to forward, but does not wait for a client that has
half-closed the connection."""
PAUSE_S = 0.02
_STATUS = re.compile(rb"(?:\A|\n)HTTP/1\.[01] (\d{3})[ \r]")
_SERVED = (b'"choices"', b'"object":"list"', b'"workers"')
"""Text that only occurs in responses of routes that require an API key."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A response."""

    status: int
    """HTTP status; 0 if there was no response."""
    text: bytes = b""
    """Start and end of the response."""
    num_bytes: int = 0
    is_stream: bool = False
    seconds: float = 0.0
    error: str = ""
    """Reason for a missing or incomplete response."""


Fault = Literal["server_error", "unanswered", "malformed", "keyless"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A fault that no request is allowed to cause."""

    fault: Fault
    text: str


def problem_of(answer: Answer) -> Problem | None:
    """Problem with the response to a valid HTTP request, which must be complete."""
    if answer.status >= 500:
        return Problem(fault="server_error", text=f"HTTP {answer.status}: {_start(answer)}")
    if answer.status == 0 or answer.error:
        return Problem(fault="unanswered", text=answer.error or "closed")
    if answer.status == 200:
        return _problem_of_stream(answer) if answer.is_stream else None
    if answer.status >= 400 and _is_error(answer.text):
        return None
    return Problem(fault="malformed", text=f"HTTP {answer.status}: {_start(answer)}")


def _problem_of_stream(answer: Answer) -> Problem | None:
    lines = [line for line in answer.text.splitlines() if line]
    last = lines[-1] if lines else b""
    if last == b"data: [DONE]":
        return None
    if not last.startswith(b'data: {"error"'):
        return Problem(fault="unanswered", text="a stream without its final event")
    # An error after the status was sent; its type is named after a status.
    if b'"internal_server_error"' in last or b'"service_unavailable_error"' in last:
        return Problem(fault="server_error", text=f"in a stream: {last[:400].decode()}")
    return None


def _is_error(text: bytes) -> bool:
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        # Only the start of a long message is kept.
        return len(text) >= KEPT_BYTES and text.startswith(b'{"error":{"message":"')
    return isinstance(error, dict) and isinstance(error.get("message"), str)


def _start(answer: Answer) -> str:
    return answer.text[:400].decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A problem, and the request that caused it."""

    kind: str
    problem: Problem
    request: str


def judge_found(found: Sequence[Found]) -> list[Check]:
    """Checks that no problem of any kind was found."""
    faults = Counter(one.problem.fault for one in found)
    return [
        exactly("server_errors", faults["server_error"], "requests", 0),
        exactly("unanswered", faults["unanswered"], "requests", 0),
        exactly("malformed", faults["malformed"], "requests", 0),
        exactly("keyless", faults["keyless"], "requests", 0),
    ]


def open_session(api_key: str) -> aiohttp.ClientSession:
    """A session with a shorter keep-alive timeout than the fleet's."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {api_key}"},
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def send(
    session: aiohttp.ClientSession, base_url: str, case: Case, timeout_s: float = ANSWER_S
) -> Answer:
    """Sends a request and reads the whole response; keeps only its start and end."""
    began = time.monotonic()
    status, num_bytes, is_stream, error = 0, 0, False, ""
    first, last = b"", b""
    headers = {"Content-Type": case.content_type}
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(base_url + case.path, data=case.body, headers=headers) as response,
        ):
            status = response.status
            is_stream = response.content_type == "text/event-stream"
            async for part in response.content.iter_any():
                num_bytes += len(part)
                first += part[: KEPT_BYTES - len(first)]
                last = (last + part)[-KEPT_BYTES:]
    except TimeoutError:
        error = f"no complete response within {timeout_s:.0f} s"
    except (aiohttp.ClientError, OSError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    return Answer(
        status=status,
        text=first if num_bytes <= KEPT_BYTES else first + b"\n" + last,
        num_bytes=num_bytes,
        is_stream=is_stream,
        seconds=time.monotonic() - began,
        error=error,
    )


async def each(
    items: Iterable[T], work: Callable[[T], Awaitable[None]], *, at_once: int, deadline: float
) -> int:
    """Runs `work` for each item, `at_once` concurrently, until `deadline`; returns the number of
    finished items."""
    waiting = iter(items)
    done = 0

    async def take_turns() -> None:
        nonlocal done
        for item in waiting:
            if time.monotonic() > deadline:
                return
            await work(item)
            done += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(take_turns())
    return done


class Neighbour:
    """A client that shares the proxy's connections with hostile ones, and recognizes its own
    responses."""

    def __init__(self, base_url: str, model: str, api_key: str) -> None:
        self.num_requested = 0
        self.num_wrong = 0
        self._url = base_url + TEXT
        self._body = {"model": model, "prompt": "hi", "max_tokens": 1}
        self._api_key = api_key

    async def ask_on(self) -> None:
        """Sends requests in sequence until cancelled."""
        async with open_session(self._api_key) as session:
            while True:
                request_id = f"neighbour-{self.num_requested}"
                headers = {"X-Request-Id": request_id}
                is_own = False
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with (
                        asyncio.timeout(ANSWER_S),
                        session.post(self._url, json=self._body, headers=headers) as response,
                    ):
                        answer = await response.read()
                        received_id = response.headers.get("x-request-id")
                        is_own = response.status == 200 and received_id == request_id
                        is_own = is_own and request_id.encode() in answer
                self.num_requested += 1
                self.num_wrong += not is_own


@dataclass(frozen=True, kw_only=True, slots=True)
class RawAnswer:
    """Bytes received over a connection."""

    statuses: tuple[int, ...]
    """Statuses of all responses, except 1xx."""
    text: bytes
    is_closed: bool
    """Whether the server closed the connection."""


async def send_raw(port: int, case: RawCase) -> RawAnswer:
    """Sends the parts of a case; reads until there is a response or the connection ends."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        return RawAnswer(statuses=(), text=str(error).encode(), is_closed=True)
    received = bytearray()
    try:
        sending = asyncio.create_task(_send_pieces(writer, case))
        is_closed = await _receive(reader, received, HALF_CLOSE_S)
        if not is_closed and not _statuses(received):
            await sending
            if not case.deserves_answer and writer.can_write_eof():
                # Not immediately: a server may treat it as a disconnect and not respond.
                writer.write_eof()
            is_closed = await _receive(
                reader, received, ANSWER_S if case.deserves_answer else CLOSE_S
            )
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    except OSError:
        is_closed = True
    finally:
        writer.transport.abort()
    return RawAnswer(statuses=_statuses(received), text=bytes(received), is_closed=is_closed)


async def _send_pieces(writer: asyncio.StreamWriter, case: RawCase) -> None:
    for number, piece in enumerate(case.pieces):
        if number:
            await asyncio.sleep(PAUSE_S)
        writer.write(piece)
        await writer.drain()


async def _receive(reader: asyncio.StreamReader, received: bytearray, seconds: float) -> bool:
    """Reads a response and everything that arrives with it; returns whether the server has closed
    the connection."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    has_answer = False
    while True:
        try:
            async with asyncio.timeout_at(until):
                part = await reader.read(65536)
        except TimeoutError:
            return False
        except OSError:
            return True
        if not part:
            return True
        received += part
        if not has_answer and _statuses(received):
            has_answer = True
            until = min(
                until, loop.time() + 10 * PAUSE_S
            )  # for responses to data that was sent directly after it


def _statuses(received: bytes | bytearray) -> tuple[int, ...]:
    found = map(int, _STATUS.findall(received))
    return tuple(status for status in found if status >= 200)


def problem_of_raw(case: RawCase, answer: RawAnswer, api_key: str) -> Problem | None:
    """Problem with the response to arbitrary bytes. Some need no response, but all connections must
    be closed."""
    failed = [status for status in answer.statuses if status >= 500]
    if failed:
        return Problem(fault="server_error", text=f"HTTP {failed[0]}: {answer.text[:400]!r}")
    if case.deserves_answer and not answer.statuses:
        return Problem(fault="unanswered", text="no response to a complete request")
    if not answer.statuses and not answer.is_closed:
        return Problem(
            fault="unanswered", text=f"no response, and not closed within {CLOSE_S:.0f} s"
        )
    has_key = api_key.encode() in b"".join(case.pieces)
    if not has_key and any(word in answer.text for word in _SERVED):
        return Problem(fault="keyless", text=f"{answer.text[:400]!r}")
    return None
