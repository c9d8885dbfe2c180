"""Changes to a running fleet: who may make them, and that all current and future gateways apply
them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from router.api.app import create_app
from router.config import AccessConfig, GatewayConfig
from router.gateway import Gateway
from router.serving import settings as settings_module
from tests.support.router.settings_store import Store
from worker.protocol.admission import AdmissionChange, AdmissionOptions

USERS = ("alpha", "beta")
ADMIN = "omega"
AS_ADMIN = {"authorization": f"Bearer {ADMIN}"}
PACK = {"prefill_admission_policy": "pack", "max_prefill_share": 0.25}


def changes_at(worker: Any) -> list[dict[str, Any]]:
    return [batch.admission.given for batch in worker.batches if batch.admission]


def without_changes(rig: Any) -> bool:
    return not any(batch.admission for worker in rig.workers for batch in worker.batches)


async def post(rig: Any, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    headers = AS_ADMIN if headers is None else headers
    return await rig.client.post("/admin/admission", json=body, headers=headers)


async def test_rules_go_to_every_worker_and_to_those_that_come_later(rig):
    await rig.start(admin_api_key=ADMIN)
    response = await post(rig, {"model": "stub", **PACK})
    assert response.status_code == 200, response.text
    assert sorted(response.json()["workers"]) == ["w0", "w1"]
    await rig.until(lambda: all(changes_at(worker) == [PACK] for worker in rig.workers))
    refused = await rig.client.get("/admin/admission")
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    response = await rig.client.get("/admin/admission?model=alias", headers=AS_ADMIN)
    assert response.json() == {"model": "stub", **PACK}
    rig.workers[1].crash()
    rig.workers[1].send(rig.workers[1].snapshot())
    await rig.until(lambda: changes_at(rig.workers[1]) == [PACK, PACK])


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"prefill_admission_policy": "best"}, "prefill_admission_policy"),
        ({"prefill_admission_lookahead": 0}, "prefill_admission_lookahead in --scheduler-config"),
        ({"lookahead": 3}, "lookahead"),
        (
            {"prefill_max_tokens": 2**31},
            "--scheduler-config must be in [0, 2147483647]",
        ),
        (
            {"prefill_max_tokens": 2**64},
            "--scheduler-config must be in [0, 2147483647]",
        ),
        ({"prefill_first_steps": 10**300}, "prefill_first_steps in --scheduler-config must be in"),
        (
            {"max_prefill_share": 1e-320},
            "max_prefill_share in --scheduler-config must be in [0.001",
        ),
        ({}, "nothing to change"),
        ([], "object"),
        ({"model": 5}, "model"),
    ],
)
async def test_wrong_rules_are_a_400_and_reach_nobody(rig, body, complaint):
    await rig.start(admin_api_key=ADMIN)
    response = await post(rig, body)
    assert response.status_code == 400
    assert complaint in response.json()["error"]["message"]
    assert without_changes(rig)


@pytest.mark.parametrize(
    "field", [o.name for o in fields(AdmissionOptions) if "policy" not in o.name]
)
async def test_no_number_keeps_requests_from_the_workers(rig, field):
    """Every accepted change can be sent, and rejected ones have no effect."""
    await rig.start(admin_api_key=ADMIN)
    for value in (2**31 - 1, 2**31, 2**63, 2**64, 2**200, -1, 0, 0.5, 1e308):
        response = await post(rig, {field: value})
        assert response.status_code in (200, 400)
        assert (await rig.chat()).status_code == 200, f"after {value}"


async def test_what_cannot_be_encoded_is_dropped_by_itself(rig):
    await rig.start()
    poison = AdmissionChange()
    poison.given["prefill_max_tokens"] = 2**64
    assert len(rig.gateway.model("stub")._notify_admission(poison)) == 2
    responses = [await rig.chat() for _ in range(4)]
    assert [response.status_code for response in responses] == [200] * 4


@pytest.mark.parametrize("keys", [(), USERS])
async def test_without_an_admin_key_the_routes_are_off_and_say_how_to_open_them(rig, keys):
    await rig.start(api_keys=keys)
    for key in (*USERS, ADMIN, ""):
        response = await post(rig, PACK, {"authorization": f"Bearer {key}"})
        assert response.status_code == 403
        assert "--admin-api-key-file" in response.json()["error"]["message"]
    assert (await post(rig, PACK, {})).status_code == 403
    assert without_changes(rig)


async def test_keys_of_users_do_not_open_admin_nor_the_admin_s_the_rest(rig, tmp_path: Path):
    file = tmp_path / "admins"
    file.write_text("# who\nsecond\n")
    await rig.start(api_keys=USERS, admin_api_key=ADMIN, admin_api_key_file=str(file))
    for key in (*USERS, "", "nobody"):
        response = await post(rig, PACK, {"authorization": f"Bearer {key}"})
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert without_changes(rig)
    for key in (ADMIN, "second"):
        headers = {"authorization": f"Bearer {key}"}
        assert (await post(rig, PACK, headers)).status_code == 200
        assert (await rig.client.get("/v1/models", headers=headers)).status_code == 401
    for path in ("//admin/admission", "/Admin/admission", "/admin", "/x/../admin/admission"):
        response = await rig.client.post(path, json=PACK)
        assert response.status_code in (401, 404), path


class Gateways:
    """Additional gateways of the rig's workers, like separate processes."""

    def __init__(self, rig: Any, store: Store) -> None:
        self.rig = rig
        self.store = store
        self.gateways: list[Gateway] = []

    async def start(self) -> httpx.AsyncClient:
        config = GatewayConfig(
            models=self.rig.config.models, access=AccessConfig(admin_api_key=ADMIN)
        )
        gateway = Gateway(config, {"stub": self.rig.transport}, settings={"stub": self.store})
        self.gateways.append(gateway)
        await gateway.start()
        asgi = httpx.ASGITransport(app=create_app(gateway))
        return httpx.AsyncClient(transport=asgi, base_url="http://gateway", headers=AS_ADMIN)

    def change(self, place: int) -> dict[str, Any]:
        return self.gateways[place].model("stub").admission.change.given

    async def close(self) -> None:
        for gateway in self.gateways:
            await gateway.close()


@pytest.fixture
async def gateways(rig: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(settings_module, "POLL_S", 0.01)
    for worker in rig.workers:
        worker.snapshots_to_all = True
    gateways = Gateways(rig, Store())
    yield gateways
    await gateways.close()


async def test_a_change_reaches_every_gateway_and_survives_them(rig, gateways):
    first, second = await gateways.start(), await gateways.start()
    assert (await first.post("/admin/admission", json=PACK)).status_code == 200
    await rig.until(lambda: gateways.change(1) == PACK)
    later = {"prefill_max_tokens": 64, "max_prefill_share": 0.75}
    assert (await second.post("/admin/admission", json=later)).status_code == 200
    await rig.until(lambda: gateways.change(0) == {**PACK, **later})
    await gateways.close()
    gateways.gateways.clear()
    await gateways.start()
    assert gateways.change(0) == {**PACK, **later}, "known before the first worker is"
    for worker in rig.workers:
        worker.batches.clear()
    rig.workers[0].send(rig.workers[0].snapshot())
    await rig.until(lambda: changes_at(rig.workers[0])[-1:] == [{**PACK, **later}])


async def test_a_change_that_cannot_be_kept_is_a_503_and_changes_nothing(rig, gateways):
    client = await gateways.start()
    gateways.store.failure = ConnectionError("the GCS is gone")
    response = await client.post("/admin/admission", json=PACK)
    assert response.status_code == 503
    assert "the GCS is gone" in response.json()["error"]["message"]
    assert gateways.change(0) == {}
    assert without_changes(rig)
    gateways.store.failure = None
    assert (await client.post("/admin/admission", json=PACK)).status_code == 200


async def test_what_the_store_holds_and_no_release_knows_is_left_alone(rig, gateways):
    left = {"prefill_max_tokens": "many", "prefill_colour": 3, "prefill_first_steps": 2}
    gateways.store.values = {name: msgspec.msgpack.encode(v) for name, v in left.items()}
    client = await gateways.start()
    assert gateways.change(0) == {"prefill_first_steps": 2}
    assert (await client.post("/admin/admission", json=PACK)).status_code == 200
    assert gateways.change(0) == {"prefill_first_steps": 2, **PACK}
