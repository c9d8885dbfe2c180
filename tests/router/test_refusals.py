"""Rejected requests are rejected before anything is done, cached, counted or booked for them."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.api.http import body as body_module
from router.fleet import PromptBlocks
from tests.support.router.stub_worker import StubWorker
from worker.protocol.messages import LoadSnapshot, StepShape, WorkerUpdate
from worker.protocol.structured import StructuredOutputsParams

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello there, wörld"}]
KEY = "the-key"
TIMES = 1000


class Kind(NamedTuple):
    """A rejected request."""

    path: str
    body: bytes
    param: str | None
    status: int = 400
    key: str = KEY
    tokenized: bool = False
    """Whether that requires its prompt's tokens."""


def chat(param: str | None, *, status: int = 400, tokenized: bool = False, **fields: Any) -> Kind:
    body = json.dumps({"messages": USER, **fields}).encode()
    return Kind(CHAT, body, param, status, tokenized=tokenized)


def text(param: str | None, *, tokenized: bool = False, **fields: Any) -> Kind:
    return Kind(TEXT, json.dumps({"prompt": "hi", **fields}).encode(), param, tokenized=tokenized)


KINDS = {
    "no JSON": Kind(CHAT, b'{"messages": [', None),
    "not UTF-8": Kind(CHAT, b'{"messages": "\xff"}', None),
    "no object": Kind(TEXT, b"[1, 2]", None),
    "nested without end": Kind(TEXT, b"[" * 5000, None),
    "no messages": Kind(CHAT, b'{"model": "stub"}', "messages"),
    "empty messages": chat("messages", messages=[]),
    "messages of the wrong type": chat("messages", messages="hi"),
    "an unknown role": chat("messages", messages=[{"role": "pirate", "content": "x"}]),
    "a part without a type": chat("messages", messages=[{"role": "user", "content": [{}]}]),
    "no prompt": Kind(TEXT, b'{"model": "stub"}', "prompt"),
    "a prompt of the wrong type": text("prompt", prompt=[1, "a"]),
    "an unknown model": chat("model", status=404, model="nope"),
    "a model of the wrong type": chat("model", model=5),
    "a wrong key": Kind(CHAT, json.dumps({"messages": USER}).encode(), None, 401, "nobody's"),
    "too large a body": Kind(TEXT, b"x" * 70_000, None, 413),
    "a wrong type": chat("temperature", temperature="hot"),
    "a type wrong in its depth": text("stop_token_ids", stop_token_ids=[1, 2, "x"]),
    "a number beyond all": Kind(TEXT, b'{"prompt": "a", "top_p": 1' + b"0" * 400 + b"}", "top_p"),
    "an unsupported field": text("suffix", suffix="x"),
    "tools": chat("tools", tools=[{"type": "function"}]),
    "temperature": chat("temperature", temperature=-1),
    "top_p": chat("top_p", top_p=0),
    "top_k": text("top_k", top_k=2**31),
    "min_p": text("min_p", min_p=2),
    "seed": text("seed", seed=2**64),
    "no choices": chat("n", n=0),
    "n": chat("n", n=129),
    "completions": text("n", prompt=["a"] * 100, n=100),
    "max_tokens": chat("max_tokens", max_tokens=0),
    "max_completion_tokens": chat("max_completion_tokens", max_completion_tokens=0),
    "min_tokens": text("min_tokens", min_tokens=9, max_tokens=3),
    "frequency_penalty": chat("frequency_penalty", frequency_penalty=3),
    "presence_penalty": chat("presence_penalty", presence_penalty=-3),
    "repetition_penalty": chat("repetition_penalty", repetition_penalty=0),
    "an empty stop": chat("stop", stop=[""]),
    "many stops": text("stop", stop=["x"] * 129),
    "long stops": text("stop", stop=["x" * 9000]),
    "a stop token": text("stop_token_ids", stop_token_ids=[-1]),
    "stop tokens": text("stop_token_ids", stop_token_ids=[1] * 1025),
    "no token id": chat("logit_bias", logit_bias={"five": 1}),
    "a bias outside of the vocabulary": chat("logit_bias", logit_bias={"99999": 1}),
    "allowed outside of the vocabulary": text("allowed_token_ids", allowed_token_ids=[1000]),
    "more allowed than there are": text("allowed_token_ids", allowed_token_ids=[1] * 1001),
    "too much per completion": text("n", prompt=["a"] * 16, n=128, stop_token_ids=[7] * 513),
    "none allowed": text("allowed_token_ids", allowed_token_ids=[]),
    "an empty bad word": text("bad_words", bad_words=[""]),
    "top_logprobs": chat("top_logprobs", top_logprobs=3),
    "logprobs": text("logprobs", logprobs=21),
    "prompt_logprobs": chat("prompt_logprobs", prompt_logprobs=1, stream=True),
    "cache_salt": chat("cache_salt", cache_salt="x" * 2000),
    "priority": chat("priority", priority=10),
    "an unknown slo": chat("slo", slo={"ttft": 5}),
    "slo": text("slo", slo={"ttft_ms": 0}),
    "stream_options": chat("stream_options", stream_options={"include_usage": True}),
    "template arguments": chat("chat_template_kwargs", chat_template_kwargs={"tools": []}),
    "response_format": chat("response_format", response_format={"type": "yaml"}),
    "two grammars": chat("structured_outputs", structured_outputs={"regex": "a", "choice": ["b"]}),
    "no choice": text("structured_outputs", structured_outputs={"choice": []}),
    "diffusion": chat("diffusion", diffusion={"speed": 3}),
    "diffusion of another model": chat("diffusion", diffusion={"threshold": 0.5}),
    "ids outside of the vocabulary": text("prompt", prompt=[5, 1000]),
    "a negative id": text("prompt", prompt=[[5], [5, -1]]),
    "an id beyond 32 bits": text("prompt", prompt=[5, 2**40]),
    "too many ids": text("prompt", prompt=[5] * 300),
    "no ids in one of two": text("prompt", prompt=[[5], []]),
    "too many characters": text("prompt", prompt="x" * 5000),
    "too many characters of a field": chat("messages", chat_template_kwargs={"x": "y" * 5000}),
    "a template that refuses": chat("messages", messages=[{"role": "tool", "content": "x"}]),
    "too many tokens": text("prompt", prompt="a b c d " * 70, tokenized=True),
    "too many tokens after good ones": text(
        "prompt", prompt=["one two three four five six", "a b c d " * 70], tokenized=True
    ),
    "no tokens": text("prompt", prompt="", tokenized=True),
    "too long a chat": chat(
        "messages", messages=[*USER, {"role": "user", "content": "a b c d " * 300}], tokenized=True
    ),
    "min_tokens that find no room": text(
        "min_tokens", prompt=[5] * 200, min_tokens=100, max_tokens=200
    ),
}


async def refused(rig: Any, kind: Kind) -> tuple[int, bytes]:
    """Status and body of the response, over plain ASGI: a client would cost more than the
    gateway."""
    sent: list[dict[str, Any]] = []
    events = iter([{"type": "http.request", "body": kind.body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        return next(events, {"type": "http.disconnect"})

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    scope = {
        "type": "http",
        "method": "POST",
        "path": kind.path,
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {kind.key}".encode())],
    }
    await rig.app(scope, receive, send)
    await asyncio.sleep(0)
    return sent[0]["status"], sent[-1]["body"]


def state_of(thing: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Everything that an object contains, in order, down to numbers and arrays."""
    seen = set() if seen is None else seen
    if thing is None or isinstance(thing, bool | int | float | str | bytes):
        yield thing
    elif isinstance(thing, np.ndarray):
        yield thing.shape, thing.dtype.str, thing.tobytes()
    elif not callable(thing) and id(thing) not in seen:
        seen.add(id(thing))
        yield type(thing).__name__
        if isinstance(thing, dict):
            parts = [part for item in thing.items() for part in item]
        elif isinstance(thing, list | tuple | set | frozenset):
            parts = list(thing)
        else:
            names = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
            names += getattr(thing, "__dict__", {})
            parts = [part for n in names if hasattr(thing, n) for part in (n, getattr(thing, n))]
        for part in parts:
            if not isinstance(part, FunctionType | MethodType):
                yield from state_of(part, seen)


def estimates(rig: Any) -> dict[str, list[Any]]:
    """All state that routing uses, caches of prompts, and open requests."""
    model = rig.gateway.model("stub")
    channels = model._channels.values()
    assert len(model.fleet.table), "what was reported is priced when somebody looks: now"
    parts = {
        "fleet": model.fleet,
        "batch_window": model._placer._batch_window._waiting,
        "pieces": (model.encoder._pieces._pieces, model.encoder._pieces._num_bytes),
        "in_flight": [
            (c._in_flight, c._orphaned, c._submit_queue._submits, c._submit_queue._aborts)
            for c in channels
        ],
        "grammars": [
            (c._submit_queue._known_grammars, c._submit_queue._followers) for c in channels
        ],
        "stats": {n: getattr(model.stats, n) for n in model.stats.__slots__},
        "load": model.load,
        "waiting": model._placer._num_waiting,
        "resuming": model._placer._resuming,
    }
    return {name: list(state_of(part)) for name, part in parts.items()}


def gauges_and_histograms(rig: Any) -> list[Any]:
    families = text_string_to_metric_families(rig.gateway.metrics("text/plain").decode())
    return [
        (sample.name, sample.labels, sample.value)
        for family in families
        if family.type != "counter"
        for sample in family.samples
    ]


def with_steps(worker: StubWorker) -> None:
    """Reports a worker's step, so that speeds and utilisation are not round numbers."""
    plain = worker.load

    def load() -> LoadSnapshot:
        report = plain()
        report.step_ms, report.step_shape = 12.5, StepShape(7, 96, 4000, 3, 500)
        report.num_waiting, report.queued_prefill_tokens = 2, 333
        return report

    worker.load = load  # type: ignore[method-assign]


@pytest.fixture
async def busy(rig: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A gateway with a history, with a stopped clock."""
    monkeypatch.setattr(body_module, "MAX_BODY_BYTES", 65_536)
    for worker in rig.workers:
        with_steps(worker)
    await rig.start(api_keys=(KEY,))
    rig.client.headers["authorization"] = f"Bearer {KEY}"
    for text in ("one two three four five six", "the quick brown fox", "hello " * 40):
        assert (await rig.chat(text * 3, n=2)).status_code == 200
        assert (await rig.complete(text * 3)).status_code == 200
    model = rig.gateway.model("stub")
    now = model.fleet._clock()
    model.fleet._clock = lambda: now
    model.load._clock = lambda: now
    model.load.read()
    held = PromptBlocks(np.arange(5, 90, dtype="<i4").tobytes(), memo=model.fleet.memo)
    assert model.fleet.reserve("held", held) is not None
    for worker in rig.workers:
        worker.send(WorkerUpdate(1, worker._seq + 1, [], [], worker.load()))
        worker._seq += 1
    await rig.until(lambda: all(w.load.num_waiting == 2 for w in model.fleet.workers))
    return rig


async def test_the_field_at_fault_is_named(busy: Any) -> None:
    wrong = {}
    for name, kind in KINDS.items():
        status, body = await refused(busy, kind)
        error = json.loads(body)["error"]
        if (status, error["param"]) != (kind.status, kind.param):
            wrong[name] = status, error["param"], error["message"]
    assert wrong == {}


async def test_refusals_of_each_kind_change_nothing(busy: Any) -> None:
    before, shown = estimates(busy), gauges_and_histograms(busy)
    assert len(before["fleet"]) > 300
    num_submits = len(busy.submits())
    names = list(KINDS)
    for some in (names[at : at + 8] for at in range(0, len(names), 8)):
        for name in [*some, *some]:
            status, _ = await refused(busy, KINDS[name])
            assert status == KINDS[name].status
        after = estimates(busy)
        changed = [part for part in before if before[part] != after[part]]
        assert not changed, f"one of {', '.join(some)} changes {', '.join(changed)}"
        assert gauges_and_histograms(busy) == shown, some
    assert len(busy.submits()) == num_submits


@pytest.mark.long
@pytest.mark.timeout(1800)  # some 70,000 requests: two minutes on an idle machine
async def test_a_thousand_refusals_of_each_kind_leave_nothing(busy: Any) -> None:
    before = estimates(busy)
    for name, kind in KINDS.items():
        for _ in range(50):  # one-time initialization, such as the tokenizer's caches
            await refused(busy, kind)
        gc.collect()
        blocks = sys.getallocatedblocks()
        for _ in range(TIMES - 50):
            await refused(busy, kind)
        gc.collect()
        grown = sys.getallocatedblocks() - blocks
        # The tokenizer's caches vary by some 150 blocks; a leak per request would exceed that.
        assert grown < TIMES // 2, f"{name}: {grown} more objects"
    assert estimates(busy) == before


def refuse_grammars(rig: Any, message: str, *, is_final: bool) -> None:
    for worker in rig.workers:
        worker.rejection = f"structured_outputs: {message}"
        worker.rejection_status, worker.rejection_param = 400, "structured_outputs"
        worker.rejection_is_final = is_final


async def test_a_grammar_that_a_worker_has_refused_changes_nothing_again(busy: Any) -> None:
    refuse_grammars(busy, "regex cannot be used: it is broken", is_final=True)
    first = await busy.complete("hi", structured_outputs={"regex": "(a"})
    assert first.status_code == 400
    kind = text("structured_outputs", structured_outputs={"regex": "(a"})
    before, shown, num_submits = estimates(busy), gauges_and_histograms(busy), len(busy.submits())
    for _ in range(50):
        assert await refused(busy, kind) == (400, first.content)
    assert estimates(busy) == before
    assert gauges_and_histograms(busy) == shown
    assert len(busy.submits()) == num_submits, "no worker was asked again"


async def test_transient_rejections_are_retried(busy: Any) -> None:
    refuse_grammars(busy, "regex takes longer than 1.5 s to compile", is_final=False)
    for _ in range(2):
        num_submits = len(busy.submits())
        response = await busy.complete("hi", structured_outputs={"regex": "(a+)+"})
        assert response.status_code == 400
        assert len(busy.submits()) > num_submits


async def test_a_rejection_does_not_apply_to_a_new_worker(busy: Any) -> None:
    model = busy.gateway.model("stub")
    grammar = StructuredOutputsParams(regex="(a")
    model.rejected_grammars.add(grammar, "it is broken")
    assert model.rejected_grammars.find(grammar) == "it is broken"
    busy.transport.set_members("w0")
    await busy.until(lambda: len(model.fleet.workers) == 1)
    assert model.rejected_grammars.find(grammar) == "it is broken"
    busy.transport.set_members("w0", "w1")
    await busy.until(lambda: model.rejected_grammars.find(grammar) is None)


async def test_fields_are_checked_before_any_work_on_the_prompt(
    busy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = busy.gateway.model("stub")
    work: list[str] = []

    def watch(owner: Any, name: str) -> None:
        do = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            work.append(name)
            return do(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for name in ("encode", "encode_texts", "encode_pieces", "decode"):
        watch(model.tokenizer, name)
    watch(model.fleet.memo, "hashes")
    for name, kind in KINDS.items():
        work.clear()
        await refused(busy, kind)
        allowed = {"encode", "encode_texts", "encode_pieces"} if kind.tokenized else set()
        assert set(work) <= allowed, f"{name}: {work}"


async def test_a_prompt_goes_to_the_workers_that_have_room_for_it(rig: Any) -> None:
    small, large = rig.workers
    small.info = msgspec.structs.replace(small.info, max_total_tokens=64)
    await rig.start()
    for place in range(6):
        response = await rig.complete([5 + place] * 100)
        assert response.status_code == 200, response.text
    assert not any(batch.submits for batch in small.batches)
    assert len({s.request_id for batch in large.batches for s in batch.submits}) == 6
    response = await rig.complete([5] * 300)
    assert response.status_code == 400
    assert len(rig.submits()) == 6


async def test_what_waits_for_the_first_worker_is_held_against_it_before_it_is_booked(
    rig: Any,
) -> None:
    rig.transport.set_members_quietly()
    [route] = rig.config.models
    await rig.start(attached=0, models=(replace(route, on_demand=True),))
    model = rig.gateway.model("stub")
    work = asyncio.create_task(rig.chat("a b c d " * 300))
    await rig.until(lambda: model.stats.pending_requests == 1)
    rig.transport.set_members("w0")
    response = await work
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert rig.submits() == []
    assert model.fleet._num_chosen == 0, "nothing was placed"
    assert model.fleet.policy._congestion._work_s == 0.0
