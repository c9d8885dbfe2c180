"""`response_format` and `structured_outputs`, from the body to the worker and back."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from worker.protocol.messages import Rejection, TokenDelta

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}


def schema_format(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": schema_format(SCHEMA)}, "json", json.dumps(SCHEMA)),
        ({"response_format": TAG}, "structural_tag", json.dumps(TAG)),
        ({"structured_outputs": {"json": SCHEMA}}, "json", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": "{}", "regex": None}}, "json", "{}"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a","b"]'),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "grammar", "root ::= x"),
        ({"structured_outputs": {"structural_tag": TAG}}, "structural_tag", json.dumps(TAG)),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"response_format": {"type": "text"}, "structured_outputs": {}}, None, ""),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_every_form_reaches_the_worker(rig, fields, kind, text) -> None:
    await rig.start()
    for send in (rig.chat, rig.complete):
        response = await send(**fields)
        assert response.status_code == 200, response.text
    for submit in rig.submits():
        params = submit.sampling.structured_outputs
        assert (params and params.kind) == kind
        if params is not None:
            assert params.text.replace(" ", "") == text.replace(" ", ""), "keys keep their order"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": schema_format("text")}, "response_format"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a" * (2**20 + 1)}}, "structured_outputs"),
        ({"guided_json": SCHEMA}, "guided_json"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_senseless_requests_are_rejected_with_the_field(rig, fields, param) -> None:
    await rig.start()
    response = await rig.chat(**fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not rig.submits()


async def test_a_schema_of_ten_megabytes_is_refused_undecoded(rig, monkeypatch) -> None:
    plain = msgspec.json.decode

    def decode(body: bytes, type: object = None) -> object:  # msgspec's name
        assert type == dict[str, msgspec.Raw], "the schema was decoded"
        return plain(body, type=type)

    await rig.start()
    schema = {"enum": [f"value {number:09}" for number in range(500_000)]}
    with monkeypatch.context() as patch:
        patch.setattr(msgspec.json, "decode", decode)
        response = await rig.chat(response_format=schema_format(schema))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"


async def test_the_status_waits_for_the_worker_s_verdict(rig) -> None:
    await rig.start()
    for worker in rig.workers:
        worker.rejection = "structured_outputs: regex cannot be used: it is broken"
        worker.rejection_status = 400
        worker.rejection_param = "structured_outputs"
    for stream in (False, True):
        response = await rig.chat(structured_outputs={"regex": "(a"}, stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"].endswith("it is broken")
        assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_contradiction_that_is_reported_before_the_submit_s_answer(rig, stream) -> None:
    """An engine may have ended a request before the front has replied for it."""
    await rig.start(running=False)
    for worker in rig.workers:
        worker.answer_gate.clear()
    form = {"structured_outputs": {"regex": "a"}}
    work = asyncio.create_task(rig.complete(stream=stream, **form))
    await rig.until(lambda: any(worker.running for worker in rig.workers))
    [worker] = [worker for worker in rig.workers if worker.running]
    [(request_id, running)] = worker.running.items()
    worker.running.clear()
    attempt = running.submit.attempt
    delta = TokenDelta(request_id, attempt, [], "error", error="no token is left")
    delta.rejection = Rejection(
        request_id=request_id,
        attempt=attempt,
        message="no token is left",
        status=400,
        param="structured_outputs",
    )
    worker.update([delta], [])
    await rig.until(lambda: rig.gateway.model("stub").stats.finished["error"] == 1)
    worker.answer_gate.set()
    response = await work
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "structured_outputs"


async def test_choices_follow_the_first_one_of_their_grammar(rig) -> None:
    await rig.start()
    for worker in rig.workers:
        worker.compiled.clear()
    answer = asyncio.create_task(rig.complete(n=6, structured_outputs={"regex": "a"}))
    await rig.until(lambda: len(rig.submits()) == 2)  # one per worker
    await asyncio.sleep(0.02)
    assert len(rig.submits()) == 2
    for worker in rig.workers:
        worker.compiled.set()
    response = await answer
    assert response.status_code == 200
    assert len(response.json()["choices"]) == len(rig.submits()) == 6
    num_batches = sum(len(worker.batches) for worker in rig.workers)
    await rig.complete(n=2, structured_outputs={"regex": "a"})
    assert sum(len(worker.batches) for worker in rig.workers) <= num_batches + 2, "known by now"


async def test_choices_fail_with_the_first_one_of_their_grammar(rig) -> None:
    await rig.start()
    for worker in rig.workers:
        worker.rejection = "too many grammars are being compiled"
    response = await rig.complete(n=6, structured_outputs={"regex": "a"})
    assert response.status_code == 503
    for worker in rig.workers:
        worker.rejection, worker.rejection_status = "structured_outputs: broken", 400
    response = await rig.complete(n=6, structured_outputs={"regex": "a"})
    assert response.status_code == 400


async def test_others_do_not_wait_for_a_grammar(rig) -> None:
    await rig.start(attached=2)
    for worker in rig.workers:
        worker.compiled.clear()
    slow = asyncio.create_task(rig.chat(structured_outputs={"regex": "a"}))
    await rig.until(lambda: len(rig.submits()) == 1)
    plain = await asyncio.gather(*(rig.chat() for _ in range(4)))
    assert [response.status_code for response in plain] == [200] * 4
    assert not slow.done()
    for worker in rig.workers:
        worker.compiled.set()
    assert (await slow).status_code == 200


async def test_others_do_not_wait_while_a_refused_grammar_is_tried_again(rig) -> None:
    """A timeout is not final: the worker compiles again, and is late again."""
    rig.workers[1].ready = False
    await rig.start(attached=1)
    worker = rig.workers[0]
    worker.compiled.clear()
    worker.rejection, worker.rejection_status = "structured_outputs: takes longer", 400
    worker.rejection_param = "structured_outputs"
    tasks = [asyncio.create_task(rig.chat(structured_outputs={"regex": "a"})) for _ in range(3)]
    await rig.until(lambda: len(rig.submits()) == 1)
    worker.compiled.set()  # the first one is finished, and the next ones start
    worker.compiled.clear()
    await rig.until(lambda: len(rig.submits()) == 3)
    worker.rejection = None
    async with asyncio.timeout(120):
        assert (await rig.chat()).status_code == 200
    assert [len(batch.submits) for batch in worker.batches if batch.submits] == [1, 2, 1]
    worker.compiled.set()
    statuses = [response.status_code for response in await asyncio.gather(*tasks)]
    assert sorted(statuses) == [200, 200, 400]


async def test_others_do_not_wait_for_a_grammar_that_was_refused_before(rig) -> None:
    rig.workers[1].ready = False
    await rig.start(attached=1)
    worker = rig.workers[0]
    worker.rejection, worker.rejection_status = "structured_outputs: takes longer", 400
    worker.rejection_param = "structured_outputs"
    assert (await rig.chat(structured_outputs={"regex": "a"})).status_code == 400
    worker.rejection = None
    worker.compiled.clear()
    again = asyncio.create_task(rig.chat(structured_outputs={"regex": "a"}))
    await rig.until(lambda: len(rig.submits()) == 2)
    async with asyncio.timeout(120):
        assert (await rig.chat()).status_code == 200
    worker.compiled.set()
    assert (await again).status_code == 200
