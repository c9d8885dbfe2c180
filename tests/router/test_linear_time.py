"""No body takes more than linear time, and none holds the event loop for longer than 50 ms."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from tokenizers import Tokenizer as Backend

from router.api.http.auth import ADMIN_PATHS, RERANK_PATHS, SCORE_PATHS
from router.tokens.pool import SMALL_BODY
from tests.support.effort import IS_LONG
from tests.support.router.bodies import ANY, NO_BODY, POOLING, ROUTES, Shape
from tests.support.router.rig import Rig, build_checkpoint
from worker.protocol.pooling import PoolingInfo
from worker.protocol.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.slow
SIZE = SMALL_BODY - 1024
"""Bytes of the largest body that is decoded on the event loop, in any shape."""
GROWTH = 4
"""Size of the larger body over that of the smaller one."""
MAX_RATIO = 2.0 * GROWTH
"""Maximum ratio of CPU times: linear work has at most GROWTH, quadratic work GROWTH²."""
MAX_SLICE_S = 0.05
"""Maximum CPU time between two polls of the event loop's sockets, which pauses streams."""
REFERENCE_S = 0.03
"""CPU time of `reference()` on an idle core (Xeon with AMX, Python 3.11). If it takes longer,
limits are scaled accordingly: for slower cores, and beside other processes."""
FLOOR_S = 0.02
"""CPU time below which a ratio is noise."""
TRIES = 3
"""Measurements of a case; the minimum counts, as other processes only add to it."""
TEMPLATE = (
    "{%- for message in messages %}<|start|>{{ message.role }}<|channel|>analysis<|message|>"
    "{{ message.content.split('</think>')[-1] }}{{ message.thinking }}"
    "{%- for call in message.tool_calls or () %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{%- endfor %}<|end|>{%- endfor %}"
    "{%- for tool in tools or () %}{{ tool.function.name }}{%- endfor %}"
)
"""Uses harmony's parsers, which split each call, and drops reasoning from the history."""
ALL_CASES = [
    (path, kind, shape)
    for path, of_route in ROUTES.items()
    for kind, shape in {**ANY, **of_route}.items()
]
CONTAINED = {
    "messages": "messages of many roles",
    "calls and results": "results in reverse",
    "truncated messages": "truncated systems",
    "a long prompt": "echo",
}
"""Shapes that only `make check-long` measures on the first route that has them, with the shape that
runs the same code and more."""


def _is_measured(path: str, kind: str, shape: Shape) -> bool:
    """Whether `make test` measures a case.

    All routes decode bodies alike: the shapes for any of them go round the routes. Those that some
    routes share are measured on the first of these; the others measure one of them.
    """
    if kind in ANY:
        return list(ANY).index(kind) == list(ROUTES).index(path) % len(ANY)
    own = [kind for kind, shape in ROUTES[path].items() if _first_route(kind, shape) == path]
    shared = [kind for kind in ROUTES[path] if kind not in own]
    return kind in shared[:1] or (kind in own and CONTAINED.get(kind) not in own)


def _sizes(path: str, kind: str) -> tuple[int, int]:
    """Sizes of the smaller and the larger body.

    One of them is the largest that is decoded on the event loop. Those above are decoded in threads
    and take most of the time: `make test` measures them in one of the route's own shapes.
    """
    own = (case[1] for case in CASES if case[0] == path and case[1] not in ANY)
    return (SIZE, GROWTH * SIZE) if IS_LONG or kind == next(own, "") else (SIZE // GROWTH, SIZE)


def _first_route(kind: str, shape: Shape) -> str:
    return next(route for route, shapes in ROUTES.items() if shapes.get(kind) is shape)


CASES = [case for case in ALL_CASES if IS_LONG or _is_measured(*case)]


@pytest.fixture(scope="module", autouse=True)
def _fast_collections(frozen_heap: None) -> None:
    pass


@pytest.fixture(scope="session")
def harmony_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    folder = tmp_path_factory.mktemp("linear")
    build_checkpoint(folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<|start|>", "<|channel|>", "<|message|>", "<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder, load_tokenizer(str(folder))


@pytest.fixture
async def harmony(
    harmony_model: tuple[Path, Tokenizer], request: pytest.FixtureRequest
) -> AsyncIterator[Rig]:
    """A gateway; routes of pooling models get one with such a model."""
    rig = Rig(*harmony_model)
    case = getattr(request.node, "callspec", None)
    is_pooling = case is not None and case.params.get("path") in POOLING
    for worker in rig.workers:
        if is_pooling:
            worker.info.pooling = PoolingInfo(task="embed", pooling_type="last", size=8)
        worker.info.max_model_len = worker.info.max_total_tokens = 1 << 20
        # Requests end at the worker's interface: its work is not the gateway's.
        worker.rejection, worker.rejection_status = "enough", 400
    await rig.start(admin_api_key="admin")
    yield rig
    await rig.stop()


class Slices:
    """CPU times of the event loop's iterations, in seconds."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measures the iterations of the running loop within the block."""
        loop: Any = asyncio.get_running_loop()
        run_once = loop._run_once

        def measured() -> None:
            began = time.thread_time()
            run_once()
            self.longest_s = max(self.longest_s, time.thread_time() - began)

        loop._run_once = measured
        gc.collect()
        gc.disable()  # a collection's time depends on all objects of the tests
        try:
            yield
        finally:
            gc.enable()
            del loop._run_once


async def post(rig: Rig, path: str, body: bytes) -> int:
    """Sends a body over ASGI, without a client's overhead; returns the status."""
    parts = [body[at : at + 65536] for at in range(0, len(body), 65536)]
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer admin")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
        "scheme": "http",
        "http_version": "1.1",
    }
    await rig.app(scope, receive, send)
    return statuses[0]


async def measure(rig: Rig, path: str, body: bytes) -> tuple[float, float]:
    """CPU seconds that a body takes in all threads, and the loop's longest iteration."""
    slices = Slices()
    with slices.measured():
        await asyncio.sleep(0)  # the loop's current iteration is not measured
        began = time.process_time()
        status = await post(rig, path, body)
        taken = time.process_time() - began
        await asyncio.sleep(0)
    assert status < 500, (path, status)
    return taken, slices.longest_s


def reference() -> float:
    """CPU seconds of a fixed piece of work, of the kind that validation is."""
    began = time.thread_time()
    items = [{"name": str(number), "size": number} for number in range(20_000)]
    json.loads(json.dumps(items))
    return time.thread_time() - began


def test_every_route_that_reads_a_body_has_cases(harmony: Rig) -> None:
    found = [route for route in harmony.app.routes if isinstance(route, Route)]
    routes = {r.path for r in found if (r.methods or set()) - {"GET", "HEAD", "DELETE"}}
    assert routes == set(ROUTES) | set(NO_BODY)


@pytest.mark.randomized  # with more cases
@pytest.mark.parametrize(("path", "kind", "shape"), CASES, ids=[f"{p}-{k}" for p, k, _ in CASES])
async def test_time_is_linear_in_the_body_and_short_on_the_loop(
    harmony: Rig, path: str, kind: str, shape: Shape
) -> None:
    bodies = [shape(size) for size in _sizes(path, kind)]
    await measure(harmony, path, shape(2048))  # loads everything needed on first use
    times, slices = [math.inf] * len(bodies), [math.inf] * len(bodies)
    for _ in range(TRIES):
        for index, body in enumerate(bodies):
            taken, longest = await measure(harmony, path, body)
            if longest > MAX_SLICE_S:
                longest /= max(1.0, reference() / REFERENCE_S)
            times[index] = min(times[index], taken)
            slices[index] = min(slices[index], longest)
        is_linear = times[1] <= MAX_RATIO * max(times[0], FLOOR_S)
        if is_linear and max(slices) <= MAX_SLICE_S:
            break
    assert is_linear, f"{times[0]:.3f} s, then {times[1]:.3f} s for {GROWTH} times the size"
    assert max(slices) <= MAX_SLICE_S, "the event loop is held for too long"


@pytest.mark.parametrize("path", [path for path in ROUTES if not path.startswith(ADMIN_PATHS)])
async def test_a_key_without_the_right_to_a_model_gets_no_work_on_the_body(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Its messages are invalid, which would be a 400 if they were converted; nothing is
    tokenized."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[elsewhere]\nkey = "elsewhere"\nmodels = ["another"]\n')
    await rig.start(api_key_file=str(keys))
    tokenizer = rig.gateway.model("stub").tokenizer
    for name in ("encode", "encode_texts", "decode", "render_chat", "pieces"):
        monkeypatch.setattr(tokenizer, name, lambda *_, **__: pytest.fail("work before rights"))
    wrong = [{"role": "nobody", "content": "a"}, {"role": "user", "content": "a"}]
    special: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": [{}]},
        "/v1/responses": {"input": wrong, "truncation": "auto"},
        "/v1/messages": {"messages": wrong, "max_tokens": 1},
        "/detokenize": {"tokens": [1]},
        "/v1/decisions": {"input": [], "questions": [{"type": "predicate", "instructions": "a"}]},
        "/v1/systemone": {"state": "a", "questions": {"": {"type": "noul"}}},
        **{path: {"input": [{}]} for path in ("/v1/embeddings", "/pooling", "/classify")},
        "/v2/embed": {"texts": []},
        **{path: {"text_1": "a"} for path in SCORE_PATHS},
        **{path: {"query": "a", "documents": []} for path in RERANK_PATHS},
    }
    fields = special.get(path, {"messages": wrong})
    headers = {"authorization": "Bearer elsewhere"}
    response = await rig.client.post(path, json={"model": "stub", **fields}, headers=headers)
    assert response.status_code == 404, response.text
