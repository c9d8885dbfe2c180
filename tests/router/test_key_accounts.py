"""API keys over HTTP: limits, ceilings, models, tenants, the audit log."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from router.keys import digest_of
from router.private_files import RotatedFile

KEYS = """
[slow]
key = "slow-key"
requests_per_minute = 2
max_priority = 3
slo = false
models = ["stub"]
[small]
key = "small-key"
tokens_per_minute = 10
[one]
key = "one-key"
max_concurrent_requests = 1
[elsewhere]
key = "elsewhere-key"
models = ["another"]
[free]
key = "free-key"
"""


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return str(path)


def be(rig: Any, key: str) -> None:
    rig.client.headers["authorization"] = f"Bearer {key}-key"


async def test_a_gateway_lets_in_both_kinds(rig, key_file):
    hashed = f"sha256:{digest_of(b'hidden').hex()}"
    await rig.start(api_keys=("given", hashed), api_key_file=key_file)
    statuses = {}
    for key in ("given", "hidden", "free-key", hashed, "neither"):
        headers = {"authorization": f"Bearer {key}"}
        statuses[key] = (await rig.client.get("/v1/models", headers=headers)).status_code
    assert statuses == {"given": 200, "hidden": 200, "free-key": 200, hashed: 401, "neither": 401}


async def test_rates_are_429_with_openai_s_headers(rig, key_file):
    await rig.start(api_key_file=key_file)
    be(rig, "slow")
    first = await rig.chat()
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    streamed = await rig.chat(stream=True)
    assert streamed.headers["x-ratelimit-remaining-requests"] == "0"
    refused = await rig.chat()
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(rig.submits()) == 2
    assert (await rig.client.get("/v1/models")).status_code == 200, "costs no worker anything"
    be(rig, "free")
    answer = await rig.chat()
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_tokens_are_charged_when_they_are_known(rig, key_file):
    await rig.start(api_key_file=key_file)
    be(rig, "small")
    answer = await rig.chat()
    used = answer.json()["usage"]["total_tokens"]
    assert used > 10, "else this shows nothing"
    refused = await rig.chat()
    assert refused.status_code == 429
    owed_s = (used - 10) * 6
    assert owed_s <= int(refused.headers["retry-after"]) <= owed_s + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_open_requests_are_counted_until_their_end(rig, key_file, stream):
    await rig.start(api_key_file=key_file, running=False)
    be(rig, "one")
    waiting = asyncio.create_task(rig.chat(stream=stream))
    await rig.until(lambda: bool(rig.submits()))
    assert (await rig.chat()).status_code == 429
    rig.tasks = [asyncio.create_task(worker.run()) for worker in rig.workers]
    assert (await waiting).status_code == 200
    for body in ({"n": -1}, {}, {"n": 0}, {}):
        assert (await rig.chat(**body)).status_code != 429


async def test_ceilings_are_403_and_defaults_stay_below_them(rig, key_file):
    await rig.start(api_key_file=key_file)
    be(rig, "slow")
    refused = await rig.chat(priority=4)
    assert refused.status_code == 403
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("priority", "priority_not_allowed")
    assert (await rig.chat(slo={"ttft_ms": 5})).json()["error"]["param"] == "slo"
    assert rig.submits() == []
    be(rig, "free")
    assert (await rig.chat(priority=9, slo={"ttft_ms": 500})).status_code == 200


async def test_the_default_priority_is_within_the_ceiling(rig, key_file):
    await rig.start(api_key_file=key_file)
    be(rig, "slow")
    assert (await rig.chat()).status_code == 200
    assert (await rig.chat(priority=2)).status_code == 200
    assert [submit.priority for submit in rig.submits()] == [3, 2]


async def test_models_of_others_are_not_there(rig, key_file):
    await rig.start(api_key_file=key_file)
    be(rig, "elsewhere")
    unknown = await rig.chat(model="unknown")
    refused = await rig.chat(model="stub")
    assert refused.status_code == unknown.status_code == 404
    assert refused.json()["error"]["code"] == unknown.json()["error"]["code"]
    assert (await rig.client.get("/v1/models")).json()["data"] == []
    assert (await rig.client.get("/v1/models/stub")).status_code == 404
    be(rig, "slow")
    names = [card["id"] for card in (await rig.client.get("/v1/models")).json()["data"]]
    assert names == ["stub", "alias"]
    assert (await rig.chat(model="alias")).status_code == 200


@pytest.mark.parametrize("name", ["stub", "alias"])
async def test_forbidden_and_unknown_models_have_the_same_response(rig, key_file, name):
    await rig.start(api_key_file=key_file)
    be(rig, "elsewhere")
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [5]},
    }
    for path, body in bodies.items():
        unknown, forbidden = [
            await rig.client.post(path, json={"model": model, **body}) for model in ("nope", name)
        ]
        assert unknown.status_code == forbidden.status_code == 404, path
        expected = unknown.json()["error"]["message"].replace("nope", name)
        assert forbidden.json()["error"]["message"] == expected
    unknown, forbidden = [
        (await rig.client.get(f"/v1/models/{model}")).json() for model in ("nope", name)
    ]
    assert forbidden["error"]["message"] == unknown["error"]["message"].replace("nope", name)


async def test_the_only_model_is_not_named_to_a_key_that_may_not_use_it(rig, key_file):
    await rig.start(api_key_file=key_file)
    be(rig, "elsewhere")
    response = await rig.client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message == "model is missing: GET /v1/models lists the available models"
    be(rig, "free")
    assert (await rig.client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


@pytest.mark.parametrize("num_keys", [1, 2])
async def test_several_keys_share_neither_caches_nor_turns(rig, num_keys):
    """By default the time to first token reveals nothing about another key's prompts."""
    await rig.start(api_keys=("alpha", "beta")[:num_keys])
    for key in ("alpha", "beta")[:num_keys]:
        rig.client.headers["authorization"] = f"Bearer {key}"
        assert (await rig.chat()).status_code == 200
    salts = {submit.cache_salt for submit in rig.submits()}
    tenants = {submit.tenant for submit in rig.submits()}
    assert len(salts) == len(tenants) == num_keys
    assert ("" in tenants) == (num_keys == 1)


async def test_named_keys_are_tenants_by_their_name(rig, key_file):
    await rig.start(api_key_file=key_file)
    be(rig, "free")
    assert (await rig.chat()).status_code == 200
    assert [submit.tenant for submit in rig.submits()] == ["free"]
    assert 'tenant="free"' in (await rig.client.get("/metrics")).text


async def test_the_audit_log_has_keys_and_counts_and_no_content(rig, key_file, tmp_path):
    folder = tmp_path / "audit"
    await rig.start(api_key_file=key_file, audit_log=str(folder), admin_api_key="root")
    be(rig, "free")
    usage = (await rig.chat("a secret word")).json()["usage"]
    await rig.chat("a secret word", stream=True, user="a secret user")
    await rig.chat(n=0)
    for key in ("nobody-key", "root"):
        headers = {"authorization": f"Bearer {key}"}
        await rig.client.get("/admin/admission", headers=headers)
    await rig.client.get("/v1/models", headers={"authorization": "Bearer nobody"})
    await rig.client.get("/health")
    [file] = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["status"] for line in lines] == [200, 200, 400, 401, 200, 401]
    assert [line["key"] for line in lines[:4]] == ["free"] * 3 + [""]
    for line in lines[:2]:
        assert line["prompt_tokens"] == usage["prompt_tokens"]
        assert line["generated_tokens"] == usage["completion_tokens"]
        assert line["model"] == "stub"
        assert line["request_id"]
    for word in ("secret", "free-key", "nobody", "root"):
        assert word not in file.read_text()


async def test_one_log_line_for_a_request_of_many(rig, caplog):
    await rig.start()
    with caplog.at_level("INFO", logger="router"):
        await rig.complete(["hi", "ho"], n=4)
    logged = [r.getMessage() for r in caplog.records if "generated" in r.getMessage()]
    assert len(logged) == 1
    assert logged[0].startswith("stop: ")


def test_private_files_are_private_and_do_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "audit.jsonl"
    path.parent.mkdir(0o700)
    path.write_text("from before\n")
    path.chmod(0o644)
    file = RotatedFile(path, max_bytes=1000, buffering=1)
    for number in range(1000):
        file.append(b"%08d" % number)
    file.close()
    files = list(path.parent.iterdir())
    assert len(files) == 2
    assert path.read_text().splitlines()[-1] == "00000999"
    assert all(f.stat().st_size <= 1000 for f in files)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
