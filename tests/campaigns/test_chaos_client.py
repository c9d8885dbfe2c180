"""Retries and failures of the client of `make check-chaos`."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from aiohttp import web

from cluster.ports import free_ports
from tests.campaigns.chaos.client import Client, Outcome
from tests.campaigns.chaos.planned_requests import PlannedRequest

REQUEST = PlannedRequest(index=0, kind="greedy", path="/v1/completions", body=b"{}", stream=True)
Handler = Callable[[web.Request], "asyncio.Future[web.StreamResponse]"]


def event(**fields: object) -> bytes:
    choice = {"index": 0, "text": "a", "token_ids": [1], "finish_reason": None, **fields}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


class Server:
    """Answers with each of `answers` in turn: a status, or the parts of a stream."""

    def __init__(self, *answers: int | list[bytes]) -> None:
        self.answers = list(answers)
        self.num_requested = 0
        self.gone = asyncio.Event()
        """Set when a client has disconnected mid-response."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.num_requested += 1
        found = self.answers.pop(0)
        assert request.transport is not None
        if found == 0:
            request.transport.abort()
        if isinstance(found, int):
            headers = {"Retry-After": "0"} if found in (429, 503) else {}
            return web.json_response({"error": {"message": "no"}}, status=found, headers=headers)
        response = web.StreamResponse()
        await response.prepare(request)
        for part in found:
            if part == b"cut":
                request.transport.abort()
            elif part == b"wait":
                try:
                    await asyncio.sleep(600)
                finally:
                    self.gone.set()
            else:
                await response.write(part)
        return response


@asynccontextmanager
async def serving(server: Server, port: int = 0) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    host, bound = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{bound}"
    finally:
        await runner.cleanup()


async def send_request(*answers: int | list[bytes], stream: bool = True) -> Outcome:
    async with serving(Server(*answers)) as url, Client(url) as client:
        return await client.send(replace(REQUEST, stream=stream))


async def test_a_whole_stream_is_put_together() -> None:
    found = await send_request(
        [event(), event(text="b", finish_reason="length"), b"data: [DONE]\n\n"]
    )
    assert (found.end, found.error, found.retries) == ("whole", "", [])
    assert found.answer.choices[0].text == "ab"
    assert found.answer.choices[0].token_ids == [1, 1]


async def test_the_client_retries_after_429_and_connections_closed_before_an_answer() -> None:
    found = await send_request(503, 429, 0, [event(), b"data: [DONE]\n\n"])
    assert found.end == "whole"
    reasons = [retry.reason for retry in found.retries]
    assert reasons == ["HTTP 503", "HTTP 429", "closed before an answer"]


async def test_a_refused_connection_is_tried_again_until_somebody_listens() -> None:
    (port,) = free_ports(1)
    server = Server([event(), b"data: [DONE]\n\n"])
    async with Client(f"http://127.0.0.1:{port}") as client:
        sending = asyncio.create_task(client.send(REQUEST))
        while client.outcome is None or not client.outcome.retries:
            await asyncio.sleep(0.01)
        async with serving(server, port):
            found = await sending
    assert found.end == "whole"
    assert {retry.reason for retry in found.retries} == {"connection refused"}


async def test_what_has_begun_is_never_repeated() -> None:
    for parts in ([event(), b"cut"], [event()]):
        found = await send_request(parts)
        assert (found.end, found.status, found.retries) == ("broken", 200, [])
        assert found.error


async def test_other_answers_are_failures() -> None:
    refused = await send_request(500)
    assert (refused.end, refused.status, refused.retries) == ("error", 500, [])
    failed = await send_request([event(), b'data: {"error": {"message": "lost"}}\n\n'])
    assert failed.end == "error"
    assert "lost" in failed.error


async def test_a_body_is_an_answer_too() -> None:
    body = {"choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}]}
    found = await send_request([json.dumps(body).encode()], stream=False)
    assert found.end == "whole"
    assert found.answer.choices[0].text == "ab"


async def test_the_port_of_a_request_is_that_of_its_connection() -> None:
    ports = []

    class Noting(Server):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            assert request.transport is not None
            ports.append(request.transport.get_extra_info("peername")[1])
            return await super().answer(request)

    done = [event(), b"data: [DONE]\n\n"]
    async with serving(Noting(done, done)) as url, Client(url) as client:
        found = [await client.send(REQUEST), await client.send(REQUEST)]
    assert [outcome.port for outcome in found] == ports


async def test_a_client_that_leaves_resets_its_connection_and_comes_back() -> None:
    server = Server([event(), b"wait"], [event(), b"data: [DONE]\n\n"])
    async with serving(server) as url, Client(url) as client:
        assert not client.leave()
        sending = asyncio.create_task(client.send(REQUEST))
        while client.outcome is None or not client.outcome.answer.choices:
            await asyncio.sleep(0.01)
        assert client.leave()
        assert (await sending).end == "left"
        async with asyncio.timeout(60):
            await server.gone.wait()
        assert (await client.send(REQUEST)).end == "whole"


async def test_silence_within_a_stream_is_a_pause() -> None:
    class Pausing(Server):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(event())
            await asyncio.sleep(0.6)
            await response.write(event() + b"data: [DONE]\n\n")
            return response

    async with serving(Pausing()) as url, Client(url) as client:
        found = await client.send(REQUEST)
    assert max(pause.length_s for pause in found.pauses) >= 0.5
    assert all(pause.begin >= found.begun for pause in found.pauses)


def test_a_socket_that_is_closed_has_no_port() -> None:
    with socket.socket() as gone:
        pass
    client = Client("http://127.0.0.1")
    client._socket = gone
    assert client._port() == 0
