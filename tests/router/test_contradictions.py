"""Grammars and parameters that contradict them, through a gateway to a real engine on CPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.api.app import create_app
from router.config import GatewayConfig, ModelRoute
from router.gateway import Gateway
from tests.support.effort import cases
from tests.support.engines.forked_rank import RANK_FORKER
from worker.config import EngineConfig
from worker.core.loop import serve_engine
from worker.frontend.server import WorkerFrontend
from worker.protocol.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

MODEL = "deploy/models/demo"
ENCODE = load_tokenizer(MODEL).encode
TEXTS = ("a", "b", "1", "7", '"', "{", "}", "yes", " ", "\n")
IDS = tuple({token_id for text in TEXTS for token_id in ENCODE(text)})
EOS = 2
OUT_OF_REACH = {"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": list(ENCODE("a"))}


class FrontTransport:
    """Connects to a front in the same process."""

    def __init__(self, front: WorkerFrontend) -> None:
        self._front = front

    async def attach(
        self, worker_id: str, gateway_id: str, on_item: Callable[[bytes], None]
    ) -> None:
        async with aclosing(self._front.attach(gateway_id)) as items:  # type: ignore[type-var]
            async for item in items:
                on_item(item)

    async def submit(self, worker_id: str, payload: bytes) -> bytes:
        return await self._front.submit(payload)

    def watch_workers(self, on_change: Callable[[tuple[str, ...]], None]) -> None:
        on_change((self._front.worker_id,))


class Served:
    """A gateway, a front and an engine; hypothesis calls plain functions, which drive the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start())

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return self._loop.run_until_complete(self._post(body))

    def close(self) -> None:
        self._loop.run_until_complete(self._stop())
        self._loop.close()

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        async with asyncio.timeout(120):  # HAZARD: the client's timeout needs sockets
            return await self._client.post("/v1/completions", json=body)

    async def _start(self) -> None:
        self._front = WorkerFrontend("w0")
        config = EngineConfig.of(
            model=MODEL, device="cpu", cpu_threads=1, max_model_len=128, kv_cache_tokens=4096
        )
        self._engine = RANK_FORKER.start(serve_engine, config, self._front.open())
        await self._front.wait_ready()
        route = ModelRoute(name="demo", model=MODEL)
        transport = FrontTransport(self._front)
        self._gateway = Gateway(GatewayConfig(models=(route,)), {"demo": transport}, None)
        await self._gateway.start()
        app = httpx.ASGITransport(app=create_app(self._gateway), raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=app, base_url="http://gateway", timeout=120)
        fleet = self._gateway.model("demo").fleet
        async with asyncio.timeout(120):
            while not fleet.ready:
                await asyncio.sleep(0.01)
            body = {"prompt": "hi", "structured_outputs": {"regex": "a"}}
            while (await self._post(body)).status_code != 200:  # compilers have not started
                await asyncio.sleep(0.01)

    async def _stop(self) -> None:
        await self._client.aclose()
        await self._gateway.close()
        self._front.close()
        await asyncio.to_thread(self._engine.join, 30)
        self._engine.terminate()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


def errors(response: httpx.Response) -> list[dict[str, Any]]:
    """For the complete response, or within its stream."""
    if response.status_code != 200:
        return [response.json()["error"]]
    lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
    return [event["error"] for event in map(json.loads, lines) if "error" in event]


def test_no_common_token_is_the_clients_contradiction(served: Served) -> None:
    for stream in (False, True):
        response = served.post({"prompt": "hi", "stream": stream, **OUT_OF_REACH})
        assert response.status_code == 400, response.text
        [error] = errors(response)
        assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")
        assert "allowed_token_ids" in error["message"]
        assert "structured_outputs" in error["message"]


def test_the_field_is_called_as_the_client_called_it(served: Served) -> None:
    tokens = OUT_OF_REACH["allowed_token_ids"]
    form = {"type": "json_object"}
    response = served.post({"prompt": "hi", "response_format": form, "allowed_token_ids": tokens})
    assert response.status_code == 400, response.text
    assert errors(response)[0]["param"] == "response_format"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"allowed_token_ids": [*ENCODE("1"), *ENCODE("a")]}, ["allowed_token_ids"]),
        ({"bad_words": ["B"]}, ["bad_words"]),
        ({"bad_words": ["B"], "min_tokens": 3}, ["bad_words", "min_tokens"]),
        ({"stop_token_ids": list(ENCODE("B")), "min_tokens": 9}, ["min_tokens"]),
    ],
    ids=str,
)
def test_a_contradiction_further_on_is_reported_in_the_stream(
    served: Served, fields: dict[str, Any], names: list[str]
) -> None:
    body = {"prompt": "hi", "structured_outputs": {"regex": "1aB"}, "temperature": 0, **fields}
    response = served.post(body)
    assert response.status_code == 400, response.text
    for name in ("structured_outputs", *names):
        assert name in errors(response)[0]["message"]
    response = served.post({**body, "stream": True})
    # It has started, unless the first token and the error reached a busy gateway together.
    assert response.status_code in (200, 400)
    [error] = errors(response)
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    metrics = served.post({"prompt": "hi", "max_tokens": 1})
    assert metrics.status_code == 200, "the engine continues"


grammars = st.sampled_from(
    [
        {"regex": "[0-9]{1,3}"},
        {"regex": "a*"},
        {"regex": "(a|b){2,6}"},
        {"regex": "1aB"},
        {"choice": ["yes", "no", "a"]},
        {"choice": ["1"]},
        {"json_object": True},
        {"json": {"type": "integer"}, "disable_any_whitespace": True},
        {"json": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}},
        {"grammar": 'root ::= "a" root | "b"'},
        {"grammar": "start: /[0-9]/ start?"},
        {"regex": "(a"},
    ]
)
some_ids = st.lists(st.sampled_from((*IDS, EOS, 0, 2559)), min_size=1, max_size=5)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "allowed_token_ids": some_ids,
    "bad_words": st.lists(st.sampled_from([*TEXTS, "ab", "11"]), max_size=4),
    "logit_bias": st.dictionaries(
        st.sampled_from(IDS).map(str), st.sampled_from([-100.0, -5.0, 5.0, 100.0]), max_size=4
    ),
    "min_tokens": st.integers(0, 6),
    "stop": st.lists(st.sampled_from([*TEXTS, "aa"]), max_size=3),
    "stop_token_ids": some_ids,
    "ignore_eos": st.booleans(),
    "n": st.integers(1, 3),
    "temperature": st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 100.0]),
    "top_p": st.sampled_from([1e-9, 0.5, 1.0]),
    "min_p": st.sampled_from([0.0, 1.0]),
    "repetition_penalty": st.sampled_from([1e-6, 1.0, 100.0]),
    "logprobs": st.integers(0, 3),
    "stream": st.booleans(),
}


@settings(max_examples=cases(150), deadline=None)
@given(grammar=grammars, fields=st.fixed_dictionaries({}, optional=FIELDS), seed=st.integers(0, 9))
@example(
    grammar={"regex": "a*"},
    fields={"bad_words": ["a"], "min_tokens": 1, "n": 3, "stream": True},
    seed=0,
)
def test_no_combination_of_parameters_is_an_error_of_the_server(
    served: Served, grammar: dict[str, Any], fields: dict[str, Any], seed: int
) -> None:
    body = {"prompt": "hi", "max_tokens": 8, "structured_outputs": grammar, "seed": seed, **fields}
    response = served.post(body)
    assert response.status_code in (200, 400), response.text
    for error in errors(response):
        assert 400 <= error["code"] < 500, error
