"""A request for many completions has the cost of its parameters once: counted, not timed."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.router.stub_worker import StubTransport
from worker.protocol.messages import Submit, SubmitBatch, share_sampling
from worker.protocol.sampling import SamplingParams
from worker.protocol.text.stop import StopStrings

MANY = {
    "n": 128,
    "stop_token_ids": list(range(50, 150)),
    "logit_bias": {str(token): 1.0 for token in range(100)},
    "stop": [f"{number:063}!" for number in range(128)],
    "allowed_token_ids": list(range(150)),
    "max_tokens": 1,
}
"""The parameters that may be large, for 4 prompts."""

PARAMETERS = 12_000
"""Their encoded size in bytes."""
PER_COMPLETION = 400
"""Bytes of the rest of a submit, with room for other fields."""


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens scanned, one entry per SamplingParams."""
    looked: list[int] = []
    plain = SamplingParams._check_draws

    def watched(self: SamplingParams) -> None:
        looked.append(len(self.allowed_token_ids or ()))
        plain(self)

    monkeypatch.setattr(SamplingParams, "_check_draws", watched)
    return looked


async def test_parameters_are_validated_once_and_travel_once(rig, validated, monkeypatch):
    automata: list[int] = []
    plain = StopStrings._link
    monkeypatch.setattr(
        StopStrings, "_link", lambda self: automata.append(len(self.texts)) or plain(self)
    )
    sizes: list[int] = []
    looked: list[int] = []
    send = StubTransport.submit

    async def counted(self: StubTransport, worker_id: str, payload: bytes) -> bytes:
        looked.extend(validated)
        sizes.append(len(payload))
        reply = await send(self, worker_id, payload)
        validated.clear()  # by the worker, which is in the same process
        return reply

    monkeypatch.setattr(StubTransport, "submit", counted)
    await rig.start()
    validated.clear()
    response = await rig.complete(["a", "b", "c", "d"], **MANY)
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 512
    assert looked == [150]
    assert automata.count(128) == len(automata) == 1
    assert sum(sizes) < 512 * PER_COMPLETION + len(sizes) * PARAMETERS
    submits = rig.submits()
    assert len({submit.seed for submit in submits}) == 128
    assert len({id(submit.sampling) for submit in submits}) <= len(sizes)


def test_a_batch_comes_out_as_it_went_in() -> None:
    shared, other, alone = SamplingParams(top_k=3), SamplingParams(top_k=5), SamplingParams()
    submits = [
        Submit(request_id=str(number), gateway_id="g", prompt=b"", sampling=sampling, seed=number)
        for number, sampling in enumerate((shared, alone, other, shared, other, shared))
    ]
    batch = SubmitBatch(submits=submits)
    payload = msgspec.msgpack.encode(share_sampling(batch))
    assert [submit.sampling for submit in batch.submits] == [s.sampling for s in submits]
    assert len(payload) < len(msgspec.msgpack.encode(batch)) + 60
    decoded = msgspec.msgpack.decode(payload, type=SubmitBatch)
    assert decoded == batch
    assert len({id(submit.sampling) for submit in decoded.submits}) == 3
    assert share_sampling(SubmitBatch(submits=[submits[1]])).submits == [submits[1]]


async def test_a_request_that_is_too_much_for_an_engine_is_refused(rig):
    """This once blocked a worker's front until the worker was considered failed."""
    await rig.start()
    fields = {
        "stop": [f"{number:03}" for number in range(128)],
        "stop_token_ids": list(range(1000)),
        "logit_bias": {str(token): 1.0 for token in range(1000)},
        "bad_words": [f"word {number}" for number in range(256)],
    }
    response = await rig.complete(["a"] * 16, n=128, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert rig.submits() == []
    assert (await rig.complete(["a"] * 16, n=2, **fields)).status_code == 200
