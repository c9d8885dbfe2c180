"""Large bodies do not block the event loop, and long work leaves threads to short work."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from router import work_slice
from router.api.http.body import Bodies
from router.api.openai import protocol, values
from router.errors import ApiError
from router.serving.completion import Completion
from router.serving.placing import Placer
from router.tokens import pool as pools
from router.tokens.pool import LONG, WorkPool
from worker.protocol.text.detokenizer import Detokenizer

MEBI = 1 << 20


def many(begin: str, item: str, end: str) -> bytes:
    """A body with several times the maximum number of values."""
    return f"{begin}{','.join([item] * (4 * MEBI // (len(item) + 1)))}{end}".encode()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "messages": lambda: many('{"messages":[', '{"role":"user"}', "]}"),
    "token ids": lambda: many('{"prompt":[', "1", "]}"),
    "parts": lambda: many(
        '{"messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}"
    ),
    "allowed ids": lambda: many('{"prompt":"a","allowed_token_ids":[', "1", "]}"),
    "empty lists": lambda: many('{"prompt":[', "[]", "]}"),
    "members": lambda: many('{"prompt":"a","logit_bias":{', '"1":1', "}}"),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_hostile_bodies_are_refused_undecoded_beside_the_loop(
    rig: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Decoding them would hold the GIL; `make check-hostile` measures the loop."""
    threads: list[threading.Thread] = []
    plain = protocol.check_num_values

    def watched(body: bytes) -> None:
        threads.append(threading.current_thread())
        plain(body)

    def decode(_body: bytes) -> None:
        pytest.fail("the body was decoded")

    await rig.start()
    body = HOSTILE[kind]()
    path = "/v1/chat/completions" if b"messages" in body[:20] else "/v1/completions"
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "check_num_values", watched)
        patch.setattr(msgspec.json, "decode", decode)
        response = await rig.client.post(path, content=body)
    assert response.status_code == 400, response.text
    assert f"the maximum is {values.MAX_VALUES}" in response.json()["error"]["message"]
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_large_bodies_are_decoded_beside_the_loop(
    rig: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    await rig.start()
    threads: list[bool] = []
    plain = protocol.check_grammar_sizes

    def watched(body: bytes) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        plain(body)

    monkeypatch.setattr(protocol, "check_grammar_sizes", watched)
    fields: dict[str, Any] = {"prompt": "hi"}
    if "chat" in path:
        fields = {"messages": [{"role": "user", "content": "hi"}]}
    for filling in ("", "x, " * pools.SMALL_BODY):
        content = json.dumps({**fields, "metadata": {"note": filling}})
        response = await rig.client.post(path, content=content)
        assert response.status_code == 200, response.text
    assert threads == [True, False]


JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a",:[]{}\\é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a",:[]{}\\'), inner),
)


@given(value=JSON, chunk=st.integers(1, 40))
def test_values_are_counted_whatever_texts_hold(value: Any, chunk: int) -> None:
    def cost(value: Any) -> int:
        if isinstance(value, dict):
            inner = sum(map(cost, value.values())) + values.MEMBER * len(value)
        elif isinstance(value, list):
            inner = sum(map(cost, value))
        else:
            return 0
        return values.CONTAINER + inner + max(len(value) - 1, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "CHUNK_BYTES", chunk)
        assert values.num_values(msgspec.json.encode(value)) == cost(value)


class Work:
    """Work for a pool that ends when released."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def __call__(self, name: str) -> Callable[[], str]:
        gate = self.gates[name] = threading.Event()

        def work() -> str:
            self.began.append(name)
            assert gate.wait(240)
            return name

        return work


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def test_short_work_does_not_wait_for_long_and_owners_take_turns() -> None:
    pool, work = WorkPool(2), Work()

    def run(name: str, size: int, owner: str) -> asyncio.Task[str]:
        return asyncio.create_task(pool.run(work(name), size=size, owner=owner))

    tasks = [run(f"a{number}", 4 * LONG, "a") for number in range(4)]
    await until(lambda: work.began == ["a0"])
    tasks += [run("b0", 2 * LONG, "b"), run("b1", 2 * LONG, "b")]
    tasks.append(run("short", 3600, "c"))
    await until(lambda: work.began == ["a0", "short"])
    work.gates["short"].set()
    assert await tasks[-1] == "short"
    gone = run("gone", 2 * LONG, "c")
    await asyncio.sleep(0)
    gone.cancel()
    for count, name in enumerate(("a0", "a1", "b0", "b1", "a2", "a3"), start=3):
        work.gates[name].set()
        await until(lambda count=count: len(work.began) >= min(count, 7))  # type: ignore[misc]
    await asyncio.gather(*tasks)
    first, *others = [name for name in work.began if name != "short"]
    assert first == "a0"
    assert set(others[:2]) == {"a1", "b0"}
    assert others.index("b1") < 4
    assert sorted(work.began) == ["a0", "a1", "a2", "a3", "b0", "b1", "short"]
    assert pool._held == pool._ends == {}
    assert pool._running == {False: 0, True: 0}
    pool.close()


async def test_what_may_wait_is_bounded_by_owner_and_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "MAX_WAITING", 40 * LONG)
    pool, work = WorkPool(2), Work()
    tasks = []
    for owner, most in (("", 3), ("a", 2), ("b", 0)):  # one runs; then 10, 10 and 0 of 20 wait
        for number in range(most):
            name = f"{owner}{number}"
            tasks.append(asyncio.create_task(pool.run(work(name), size=10 * LONG, owner=owner)))
            await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await pool.run(work("more"), size=10 * LONG, owner=owner)
        assert refused.value.status == 429
        assert refused.value.retry_after_s
    for gate in work.gates.values():
        gate.set()
    await asyncio.gather(*tasks)
    assert len(work.began) == 5
    assert await pool.run(lambda: 7, size=10 * LONG) == 7
    pool.close()


async def test_a_short_prompt_is_answered_while_long_ones_are_tokenized(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for worker in rig.workers:
        worker.info.max_model_len = worker.info.max_total_tokens = MEBI
    await rig.start()
    tokenizer = rig.gateway.model("stub").tokenizer
    plain, gate = tokenizer.encode, threading.Event()

    def encode(text: str, **fields: Any) -> list[int]:
        if len(text) > LONG:
            assert gate.wait(240)
            text = text[:3000]
        ids: list[int] = plain(text, **fields)
        return ids

    monkeypatch.setattr(tokenizer, "encode", encode)
    tasks = [asyncio.create_task(rig.complete("ab " * (LONG // 3 + 1))) for _ in range(8)]
    for _ in range(200):  # iterations of the loop, until all are queued
        await asyncio.sleep(0)
    try:
        async with asyncio.timeout(120):
            assert (await rig.complete("ab " * 1200)).status_code == 200
        assert not any(task.done() for task in tasks)
    finally:
        gate.set()
    assert {(await task).status_code for task in tasks} == {200}


async def test_many_completions_are_created_and_placed_in_slices(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other streams of the gateway go on between any two completions if each takes a slice."""
    await rig.start()
    monkeypatch.setattr(work_slice, "SLICE_S", 0.0)
    turn = 0
    created: list[int] = []
    placed: list[int] = []
    tokenizer, place = rig.gateway.model("stub").tokenizer, Placer.place
    detokenizer = tokenizer.detokenizer

    async def count() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    def create(**options: Any) -> Detokenizer:
        created.append(turn)
        return detokenizer(**options)

    async def watched(placer: Placer, completion: Completion) -> None:
        placed.append(turn)
        await place(placer, completion)

    monkeypatch.setattr(tokenizer, "detokenizer", create)
    monkeypatch.setattr(Placer, "place", watched)
    counting = asyncio.create_task(count())
    await asyncio.sleep(0)  # counts from here on
    response = await rig.complete("hello", n=8)
    counting.cancel()
    assert response.status_code == 200
    assert len(created) == len(set(created)) == 8
    assert len(placed) == len(set(placed)) == 8


async def test_the_parts_of_a_body_are_held_once() -> None:
    """Joining them would take twice the memory, and block the process's streams."""
    part, num_parts = b" " * 2**16, 256

    async def receive() -> dict[str, object]:
        nonlocal num_parts
        num_parts -= 1
        return {"type": "http.request", "body": bytes(bytearray(part)), "more_body": num_parts > 0}

    size = num_parts * len(part)
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)
    tracemalloc.start()
    try:
        async with Bodies().read(request) as body:
            _, peak = tracemalloc.get_traced_memory()
            assert len(body) == size
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * size
