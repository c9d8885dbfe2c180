"""How hostile requests are sent, and what counts as an answer."""

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
"""Of the begin and of the end of an answer."""
ANSWER_S = 120.0
"""For any answer to a request over HTTP: on an idle machine they take seconds."""
HALF_CLOSE_S = 0.5
"""Without an answer, after which a client that has no more to send says so."""
CLOSE_S = 30.0
"""For what is no whole request to be answered or closed: HAProxy waits for 10 s, and 60 s for more
of a body that it has begun to hand on, but not for a client that has said that there is no more."""
PAUSE_S = 0.02
_STATUS = re.compile(rb"(?:\A|\n)HTTP/1\.[01] (\d{3})[ \r]")
_SERVED = (b'"choices"', b'"object":"list"', b'"workers"')
"""In answers of guarded routes alone."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came back."""

    status: int
    """Of HTTP; 0 for none."""
    text: bytes = b""
    """Its begin and its end."""
    num_bytes: int = 0
    is_stream: bool = False
    seconds: float = 0.0
    error: str = ""
    """Why there is none, or not all of it."""


Fault = Literal["server_error", "unanswered", "malformed", "keyless"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is wrong with what came back, whatever was sent."""

    fault: Fault
    text: str


def problem_of(answer: Answer) -> Problem | None:
    """Of a request over HTTP, which deserves a whole answer."""
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
        return Problem(fault="unanswered", text="a stream that ends without its end")
    # What failed once the status was out: the type is that of a status.
    if b'"internal_server_error"' in last or b'"service_unavailable_error"' in last:
        return Problem(fault="server_error", text=f"in a stream: {last[:400].decode()}")
    return None


def _is_error(text: bytes) -> bool:
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        # A long message is not kept whole.
        return len(text) >= KEPT_BYTES and text.startswith(b'{"error":{"message":"')
    return isinstance(error, dict) and isinstance(error.get("message"), str)


def _start(answer: Answer) -> str:
    return answer.text[:400].decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A problem, and what it is of."""

    kind: str
    problem: Problem
    request: str


def judge_found(found: Sequence[Found]) -> list[Check]:
    """None of any kind."""
    faults = Counter(one.problem.fault for one in found)
    return [
        exactly("server_errors", faults["server_error"], "requests", 0),
        exactly("unanswered", faults["unanswered"], "requests", 0),
        exactly("malformed", faults["malformed"], "requests", 0),
        exactly("keyless", faults["keyless"], "requests", 0),
    ]


def open_session(api_key: str) -> aiohttp.ClientSession:
    """A session that keeps connections for less long than the fleet does."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {api_key}"},
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def send(
    session: aiohttp.ClientSession, base_url: str, case: Case, timeout_s: float = ANSWER_S
) -> Answer:
    """Sends a request and reads all of its answer, of which little is kept."""
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
        error = f"nothing, or not all of it, in {timeout_s:.0f} s"
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
    """Does `work` for each item, `at_once` at a time, until `deadline`; for how many it did."""
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
    """A client that shares the proxy's connections with hostile ones, and knows its own answers."""

    def __init__(self, base_url: str, model: str, api_key: str) -> None:
        self.num_requested = 0
        self.num_wrong = 0
        self._url = base_url + TEXT
        self._body = {"model": model, "prompt": "hi", "max_tokens": 1}
        self._api_key = api_key

    async def ask_on(self) -> None:
        """One request after the other, until it is cancelled."""
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
    """What came back over a connection."""

    statuses: tuple[int, ...]
    """Of all answers but the preliminary ones."""
    text: bytes
    is_closed: bool
    """By the server."""


async def send_raw(port: int, case: RawCase) -> RawAnswer:
    """Sends the pieces of a case; reads until an answer has come, or the end."""
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
                # Not at once: a server may take it for the client's end, and answer nothing.
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
    """Reads until there is an answer, and what comes with it; whether the server has closed."""
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
            until = min(until, loop.time() + 10 * PAUSE_S)  # for what is sent right behind it


def _statuses(received: bytes | bytearray) -> tuple[int, ...]:
    found = map(int, _STATUS.findall(received))
    return tuple(status for status in found if status >= 200)


def problem_of_raw(case: RawCase, answer: RawAnswer, api_key: str) -> Problem | None:
    """Of bytes of any kind: not all deserve an answer, but all an end."""
    failed = [status for status in answer.statuses if status >= 500]
    if failed:
        return Problem(fault="server_error", text=f"HTTP {failed[0]}: {answer.text[:400]!r}")
    if case.deserves_answer and not answer.statuses:
        return Problem(fault="unanswered", text="a whole request")
    if not answer.statuses and not answer.is_closed:
        return Problem(fault="unanswered", text=f"not closed either in {CLOSE_S:.0f} s")
    has_key = api_key.encode() in b"".join(case.pieces)
    if not has_key and any(word in answer.text for word in _SERVED):
        return Problem(fault="keyless", text=f"{answer.text[:400]!r}")
    return None
