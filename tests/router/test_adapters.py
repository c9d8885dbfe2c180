"""LoRA adapters as models: names, versions, keys, and changes that all gateways apply."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.app import create_app
from router.config import AccessConfig, GatewayConfig
from router.errors import ApiError
from router.fleet import BlockKey, PromptBlocks
from router.gateway import Gateway
from router.serving import settings as settings_module
from router.serving.adapters import AdapterRegistry, LoadedAdapter
from tests.support.router.peer_network import PeerNetwork
from tests.support.router.settings_store import Store
from tests.support.router.worker_loss import finish, lost_after
from worker.frontend.adapters import AdapterChecks
from worker.protocol.adapters import AdapterCheck, AdapterRef

ADMIN = "omega"
AS_ADMIN = {"authorization": f"Bearer {ADMIN}"}
STATIC = AdapterRef("sql", "/adapters/sql", "v-sql")
FRENCH = "/adapters/french"


@pytest.fixture
def lora(rig: Any) -> Any:
    """The rig with LoRA: `sql` is configured, and the workers have the folder of another."""
    route = replace(rig.config.models[0], enable_lora=True, lora_modules=("sql",))
    rig.config = replace(rig.config, models=(route,))
    for worker in rig.workers:
        worker.info.max_loras, worker.info.adapters = 2, [STATIC]
        worker.folders[FRENCH] = "v-french"
    return rig


async def post(client: httpx.AsyncClient, action: str, **body: Any) -> httpx.Response:
    return await client.post(f"/v1/{action}_lora_adapter", json=body, headers=AS_ADMIN)


async def load(rig: Any, name: str = "french", **body: Any) -> httpx.Response:
    return await post(rig.client, "load", lora_name=name, lora_path=FRENCH, **body)


async def chat(rig: Any, model: str) -> AdapterRef | None:
    """The adapter of the submit that a chat with this model results in."""
    for worker in rig.workers:
        worker.batches.clear()
    response = await rig.chat(model=model)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return rig.submits()[-1].adapter


async def test_a_configured_adapter_is_a_model_with_a_parent(lora):
    await lora.start()
    cards = (await lora.client.get("/v1/models")).json()["data"]
    found = [(card["id"], card["parent"], card["root"]) for card in cards]
    assert found[-1] == ("sql", "stub", "sql")
    assert [parent for _, parent, _ in found[:-1]] == [None, None]
    assert (await lora.client.get("/v1/models/sql")).json()["parent"] == "stub"
    assert await chat(lora, "sql") == STATIC
    assert await chat(lora, "stub") is None
    response = await lora.complete(model="sql")
    assert response.json()["model"] == "sql"
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("messages", {"messages": messages, "max_tokens": 5}),
        ("responses", {"input": "hi"}),
    ):
        response = await lora.client.post(f"/v1/{path}", json={"model": "sql", **body})
        assert response.json()["model"] == "sql"
    assert sum(submit.adapter == STATIC for submit in lora.submits()) == 3
    unknown = await lora.chat(model="spanish")
    assert unknown.status_code == 404
    assert "Available: stub, alias, sql." in unknown.json()["error"]["message"]


async def test_a_first_check_of_an_adapter_delays_no_other_requests(lora):
    await lora.start()
    for worker in lora.workers:
        worker.checked.clear()
    waiting = [asyncio.create_task(lora.chat(f"prompt {n}", model="sql")) for n in range(6)]
    await lora.until(lambda: len(lora.submits()) >= 1)
    for _ in range(4):
        assert (await lora.chat(model="stub")).status_code == 200
    sent = [submit for submit in lora.submits() if submit.adapter is not None]
    assert len(sent) <= len(lora.workers), "the others wait for the reply to the first"
    for worker in lora.workers:
        worker.checked.set()
    assert [(await task).status_code for task in waiting] == [200] * 6


async def test_requests_wait_for_the_worker_that_reports_a_configured_adapter(lora):
    for worker in lora.workers:
        worker.door.clear()
    await lora.start(attached=0)
    assert lora.gateway.model("sql").adapters.find("sql") is None
    waiting = asyncio.create_task(lora.chat(model="sql"))
    await lora.until(lambda: lora.gateway.model("stub").stats.pending_requests == 1)
    for worker in lora.workers:
        worker.door.set()
    assert (await waiting).status_code == 200
    assert lora.submits()[-1].adapter == STATIC


async def test_adapters_are_loaded_replaced_and_unloaded_at_run_time(lora):
    await lora.start(admin_api_key=ADMIN)
    assert (await load(lora)).text == "Success: LoRA adapter 'french' added successfully."
    assert await chat(lora, "french") == AdapterRef("french", FRENCH, "v-french")
    assert (await load(lora)).status_code == 200  # nothing has changed

    for worker in lora.workers:
        worker.folders[FRENCH] = "v-new"
    again = await load(lora)
    assert again.status_code == 400
    assert "load_inplace" in again.json()["error"]["message"]
    assert (await load(lora, load_inplace=True)).status_code == 200
    adapter = await chat(lora, "french")
    assert adapter is not None
    assert adapter.version == "v-new"

    rows = (await lora.client.get("/admin/lora_adapters", headers=AS_ADMIN)).json()["data"]
    assert [(row["lora_name"], row["lora_path"]) for row in rows] == [
        ("sql", "/adapters/sql"),
        ("french", FRENCH),
    ]
    assert (await post(lora.client, "unload", lora_name="french")).status_code == 200
    assert (await lora.chat(model="french")).status_code == 404
    gone = await post(lora.client, "unload", lora_name="french")
    assert gone.status_code == 404
    assert gone.json()["error"]["message"] == "The lora adapter 'french' cannot be found."


@pytest.mark.parametrize("change", ["replace", "unload"])
async def test_running_requests_keep_their_version_on_any_worker(lora, change):
    await lora.start(running=False, admin_api_key=ADMIN)
    assert (await load(lora)).status_code == 200
    work = asyncio.create_task(lora.chat(model="french"))
    await lora.until(lambda: any(worker.running for worker in lora.workers))
    if change == "replace":
        for worker in lora.workers:
            worker.folders[FRENCH] = "v-new"
        assert (await load(lora, load_inplace=True)).status_code == 200
    else:
        assert (await post(lora.client, "unload", lora_name="french")).status_code == 200
    finish(await lost_after(lora, 2))
    assert (await work).status_code == 200
    first, second = sorted(lora.submits(), key=lambda submit: submit.attempt)
    assert first.adapter == second.adapter == AdapterRef("french", FRENCH, "v-french")
    assert first.cache_salt == second.cache_salt
    assert second.num_resumed == 2


@pytest.mark.parametrize(
    ("body", "status", "complaint"),
    [
        ({"lora_name": "x"}, 400, "lora_path is missing"),
        ({"lora_path": FRENCH}, 400, "lora_name is missing"),
        ({"lora_name": "a b", "lora_path": FRENCH}, 400, "is not a valid name"),
        ({"lora_name": "../x", "lora_path": FRENCH}, 400, "is not a valid name"),
        ({"lora_name": "sql", "lora_path": FRENCH}, 400, "configured by --lora-modules"),
        ({"lora_name": "alias", "lora_path": FRENCH}, 400, "already the name of a model"),
        ({"lora_name": "x", "lora_path": "/none"}, 400, "/none does not exist"),
        ({"lora_name": "x", "lora_path": FRENCH, "colour": 1}, 400, "colour"),
        ({"lora_name": "x", "lora_path": FRENCH, "model": "y"}, 404, "does not exist"),
    ],
)
async def test_what_cannot_be_loaded_is_an_error(lora, body, status, complaint):
    await lora.start(admin_api_key=ADMIN)
    response = await post(lora.client, "load", **body)
    assert response.status_code == status
    assert complaint in response.json()["error"]["message"]
    assert lora.gateway.model("stub").adapters.names == ["sql"]


async def test_a_folder_must_have_the_same_adapter_at_all_workers(lora):
    await lora.start(admin_api_key=ADMIN)
    lora.workers[1].folders[FRENCH] = "another"
    response = await load(lora)
    assert response.status_code == 400
    assert "differs between the workers' nodes" in response.json()["error"]["message"]
    del lora.workers[1].folders[FRENCH]
    assert (await load(lora)).status_code == 400
    lora.workers[1].reachable = False  # the others decide
    assert (await load(lora)).status_code == 200


async def test_only_admin_keys_load_adapters_and_keys_may_be_limited_to_them(lora, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(
        '[all]\nkey = "all"\n[base]\nkey = "base"\nmodels = ["stub"]\n'
        '[customer]\nkey = "customer"\nmodels = ["sql"]\n'
    )
    await lora.start(api_key_file=str(file), admin_api_key=ADMIN)
    for key in ("all", "base", "customer", "nobody"):
        headers = {"authorization": f"Bearer {key}"}
        for action in ("load", "unload"):
            body = {"lora_name": "x", "lora_path": FRENCH}
            path = f"/v1/{action}_lora_adapter"
            assert (await lora.client.post(path, json=body, headers=headers)).status_code == 401
    allowed = {"all": {"stub", "alias", "sql"}, "base": {"stub", "alias"}, "customer": {"sql"}}
    for key, names in allowed.items():
        lora.client.headers["authorization"] = f"Bearer {key}"
        cards = (await lora.client.get("/v1/models")).json()["data"]
        assert {card["id"] for card in cards} == names
        for name in ("stub", "sql"):
            status = (await lora.chat(model=name)).status_code
            assert status == (200 if name in names else 404), (key, name)


async def test_models_without_lora_load_no_adapters(rig):
    await rig.start(admin_api_key=ADMIN)
    response = await load(rig)
    assert response.status_code == 400
    assert "--enable-lora" in response.json()["error"]["message"]


async def test_all_gateways_have_the_adapters_of_one_also_later_ones(lora, monkeypatch):
    monkeypatch.setattr(settings_module, "POLL_S", 60.0)  # calls must do
    for worker in lora.workers:
        worker.snapshots_to_all = True
    await lora.start()
    store, network = Store(), PeerNetwork()
    gateways: list[Gateway] = []

    async def start(own_id: str) -> httpx.AsyncClient:
        config = GatewayConfig(models=lora.config.models, access=AccessConfig(admin_api_key=ADMIN))
        peers = network.join(own_id)
        gateway = Gateway(config, {"stub": lora.transport}, peers=peers, adapters={"stub": store})
        gateways.append(gateway)
        await gateway.start()
        await lora.until(lambda: gateway.ready)
        asgi = httpx.ASGITransport(app=create_app(gateway))
        return httpx.AsyncClient(transport=asgi, base_url="http://gateway")

    def names(place: int) -> list[str]:
        return list(gateways[place].model("stub").adapters.loaded)

    first, second = await start("a"), await start("b")
    body = {"lora_name": "team/french", "lora_path": FRENCH}
    assert (await post(first, "load", **body)).status_code == 200
    assert names(1) == ["team/french"]  # before the response
    await start("c")
    assert names(2) == ["team/french"]

    store.failure = ConnectionError("the GCS is gone")
    late = await start("late")
    request = {"model": "team/french", "prompt": "hi", "max_tokens": 2}
    unknown = await late.post("/v1/completions", json=request)
    assert unknown.status_code == 503, "not a 404: the adapter exists"
    num_reads = store.num_reads
    network.leave("late")
    await lora.until(lambda: store.num_reads == num_reads + 3)  # since the set has changed
    assert (await post(second, "unload", lora_name="team/french")).status_code == 503
    assert names(0) == names(1) == ["team/french"]
    store.failure = None
    network.broken.add("a")  # it reads the store later
    assert (await post(second, "unload", lora_name="team/french")).status_code == 200
    assert (names(0), names(1), names(2)) == (["team/french"], [], [])
    for gateway in gateways:
        await gateway.close()


async def test_changes_start_from_the_store_and_not_from_what_a_gateway_last_read():
    store = Store()
    first, second = (AdapterRegistry("m", [], store) for _ in range(2))
    await second.start()

    async def loaded(registry: AdapterRegistry, folder: str, *, replace: bool = False) -> None:
        async def check(folder: str) -> AdapterCheck:
            return AdapterCheck(version=f"v-{folder}")

        await registry.load("french", folder, [check], replace=replace)

    await loaded(first, "/old")
    with pytest.raises(ApiError, match="has already been loaded"):
        await loaded(second, "/new")
    await loaded(first, "/new", replace=True)
    await loaded(second, "/old", replace=True)  # which it may still take for the current one
    await first.unload("french")
    with pytest.raises(ApiError, match="cannot be found"):
        await second.unload("french")
    await loaded(first, "/new")
    await second.unload("french")
    assert store.values == {}
    store.failure = ConnectionError("the GCS is gone")
    with pytest.raises(ApiError) as raised:
        await second.unload("french")
    assert raised.value.status == 503
    await second.close()


async def test_a_gateway_reads_the_adapters_again_once_others_know_it(monkeypatch):
    monkeypatch.setattr(settings_module, "POLL_S", 60.0)
    network, store = PeerNetwork(), Store()
    registry = AdapterRegistry("m", [], store, network.join("late"))
    await registry.start()
    store.values["french"] = msgspec.msgpack.encode(LoadedAdapter(FRENCH, "v", 1))
    network.join("other")
    async with asyncio.timeout(10):
        while "french" not in registry:
            await asyncio.sleep(0)
    await registry.close()


async def test_workers_that_are_loading_do_not_reject_adapters():
    async def check(folder: str) -> AdapterCheck:
        return AdapterCheck(version="v")

    async def loading(folder: str) -> AdapterCheck:
        return await AdapterChecks().check(folder, None)

    registry = AdapterRegistry("m", [], None)
    await registry.load("french", FRENCH, [check, loading], replace=False)
    assert registry.find("french") == AdapterRef("french", FRENCH, "v")
    with pytest.raises(ApiError, match="try again") as raised:
        await registry.load("other", FRENCH, [loading], replace=False)
    assert raised.value.status == 503


@given(
    st.lists(
        st.tuples(st.text(max_size=3), st.text("\0v.0123", max_size=3), st.text(max_size=3)),
        unique=True,
        min_size=2,
        max_size=6,
    )
)
def test_prompts_share_no_block_across_adapters_versions_salts_and_tenants(parts):
    data = np.arange(8, dtype="<i4").tobytes()
    key = BlockKey(4, "m")
    seen: set[int] = set()
    for salt, version, tenant in parts:
        adapter = AdapterRef("n", "/f", version) if version else None
        prompt = PromptBlocks(data, salt, adapter=adapter, tenant=tenant)
        assert prompt.followed_by([1]).adapter == adapter
        hashes = set(prompt.hashes(key).tolist())
        assert not hashes & seen
        seen |= hashes
