"""Real connections to a real uvicorn, closed and reset."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from cluster.connections import serve_middlewares
from cluster.environment import serve_settings

SCRIPT = """
import asyncio, gc, socket, struct, sys
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from cluster.connections import release_reset_connections

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})

async def ask(port, reset):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\\r\\nHost: here\\r\\n\\r\\n")
    await reader.readuntil(b"\\r\\n\\r\\n")
    if reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()

async def main(reset):
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http="httptools", lifespan="off", log_config=None, timeout_keep_alive=600
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    for _ in range(10):
        await ask(listening.getsockname()[1], reset)
    while server.server_state.connections:
        await asyncio.sleep(0.01)
    gc.collect()
    print(sum(isinstance(thing, HttpToolsProtocol) for thing in gc.get_objects()))
    server.should_exit = True
    await serving

for _ in range(int(sys.argv[1])):
    release_reset_connections()
asyncio.run(main(sys.argv[2] == "reset"))
"""


@pytest.mark.parametrize(
    ("times", "how", "kept"), [(0, "reset", 10), (1, "reset", 0), (2, "reset", 0), (1, "close", 0)]
)
def test_reset_connections_are_freed(times: int, how: str, kept: int) -> None:
    """If they are freed without the patch, it can be removed."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(times), how],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(result.stdout) == kept


async def decoding_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads headers like Serve's replica before routing."""
    headers = dict(scope["headers"])
    answer = headers[b"x-request-id"].decode("utf-8")
    for name in (b"serve_multiplexed_model_id", b"x-request-timeout-seconds", b"authorization"):
        answer += "|" + headers.get(name, b"").decode("utf-8")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": answer.encode()})


@pytest.mark.parametrize("request_id", [b"\xff\xfe", b"x" * 129, b"two words", b"", b"kept-1"])
async def test_serve_gets_only_decodable_headers(request_id: bytes) -> None:
    """The application is wrapped by Serve's own code."""
    from ray.serve._private.http_util import _apply_middlewares, validate_http_proxy_callback_return
    from ray.serve._private.utils import call_function_from_import_path

    path = serve_settings()["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    middlewares = validate_http_proxy_callback_return(call_function_from_import_path(path))
    transport = httpx.ASGITransport(app=_apply_middlewares(decoding_app, middlewares))
    headers = {
        b"X-Request-Id": request_id,
        b"serve_multiplexed_model_id": b"\xe4",
        b"x-request-timeout-seconds": b"\x80",
        b"authorization": "Bearer \u00e4".encode(),
    }
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        response = await client.get("/health", headers=headers)
    answered_id, *others = response.text.split("|")
    assert (answered_id == request_id.decode("latin-1")) == (request_id == b"kept-1")
    assert 1 <= len(answered_id) <= 128
    assert others == ["", "", "Bearer \u00e4"]


async def answering_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Echoes the request ID, as gateways do."""
    request_id = dict(scope["headers"])[b"x-request-id"]
    headers = [(b"x-request-id", request_id), (b"set-cookie", b"a"), (b"set-cookie", b"b")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": request_id})


@pytest.mark.parametrize("given", [None, b"mine-1"])
async def test_a_response_has_one_request_id(given: bytes | None) -> None:
    from ray.serve._private.http_util import _apply_middlewares

    app = _apply_middlewares(answering_app, serve_middlewares())
    headers = {} if given is None else {b"X-Request-Id": given}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as client:
        response = await client.get("http://gateway/", headers=headers)
    assert response.headers.get_list("x-request-id") == [response.text]
    assert given is None or response.content == given
    assert response.headers.get_list("set-cookie") == ["a", "b"]
