"""`rayfleet lora` against a gateway, and the metrics of adapters that `rayfleet top` shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.cli.fleet_rates import Scrape, adapter_rows
from cluster.cli.main import build_parser
from cluster.cli.top import FleetWatch, TopOptions, adapter_cells
from tests.support.router.rig import Rig, build_checkpoint
from worker.protocol.adapters import AdapterTotals
from worker.protocol.messages import LoadSnapshot, WorkerUpdate
from worker.protocol.text.tokenizer import load_tokenizer

FOLDER = "/adapters/french"


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    build_checkpoint(tmp_path)
    rig = Rig(tmp_path, load_tokenizer(str(tmp_path)))
    route = replace(rig.config.models[0], enable_lora=True)
    rig.config = replace(rig.config, models=(route,))
    for worker in rig.workers:
        worker.folders[FOLDER] = "v1"
    yield rig
    await rig.stop()


async def run(*arguments: str) -> int:
    parsed = build_parser().parse_args(arguments)
    return await asyncio.to_thread(parsed.run, parsed)  # type: ignore[no-any-return]


async def test_adapters_are_listed_loaded_and_unloaded(
    rig: Rig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start(admin_api_key="omega")
    monkeypatch.setenv("RAYFLEET_ADMIN_API_KEY", "omega")
    async with rig.server() as url:
        at = ("--url", url)
        assert await run("lora", "load", "french", FOLDER, "--model", "stub", *at) == 0
        with pytest.raises(ValueError, match="/none does not exist"):
            await run("lora", "load", "x", "/none", *at)
        load = LoadSnapshot(adapters=AdapterTotals(on_device=["v1"], on_host=["v1"]))
        update = WorkerUpdate(1, 1, [], [], load)
        rig.gateway.model("stub").fleet.update("w0", update)
        assert await run("lora", "list", *at) == 0
        assert await run("lora", "unload", "french", *at) == 0
        with pytest.raises(ValueError, match="cannot be found"):
            await run("lora", "unload", "french", *at)
        monkeypatch.delenv("RAYFLEET_ADMIN_API_KEY")
        with pytest.raises(
            ValueError, match=r"missing or invalid admin API key.*RAYFLEET_ADMIN_API_KEY or"
        ):
            await run("lora", "list", *at)
    loaded, heads, row, unloaded = capsys.readouterr().out.splitlines()
    assert loaded == "Success: LoRA adapter 'french' added successfully."
    assert heads.split() == ["ADAPTER", "MODEL", "DEVICE", "HOST", "PATH"]
    assert row.split() == ["french", "stub", "1", "1", FOLDER]
    assert unloaded == "Success: LoRA adapter 'french' removed successfully."


async def test_top_has_a_row_per_adapter_and_keys_see_those_they_may_use(
    rig: Rig, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[all]\nkey = "all"\nmonitoring = true\n[one]\nkey = "one"\nmodels = ["stub", "french"]\n'
    )
    rig.workers[0].adapters = AdapterTotals(on_device=["v1"], on_host=["v0", "v1"])
    await rig.start(admin_api_key="omega", api_key_file=str(keys))
    for name in ("french", "secret"):
        body = {"lora_name": name, "lora_path": FOLDER}
        headers = {"authorization": "Bearer omega"}
        await rig.client.post("/v1/load_lora_adapter", json=body, headers=headers)

    async def scrape(at: float, key: str) -> Scrape:
        headers = {"authorization": f"Bearer {key}"}
        return Scrape(at, [(await rig.client.get("/metrics", headers=headers)).text])

    rig.client.headers["authorization"] = "Bearer all"
    before = await scrape(1.0, "all")
    for name in ("french", "french", "secret", "stub"):
        response = await rig.chat("hello", model=name)
        assert response.status_code == 200
    tokens = response.json()["usage"]["completion_tokens"]
    now = await scrape(2.0, "all")
    french, secret = adapter_rows(before, now)
    assert (french.model, french.adapter, secret.adapter) == ("stub", "french", "secret")
    assert (french.requests_per_s, french.tokens_per_s) == (2.0, 2 * tokens)
    assert french.ttft_ms is not None
    assert (french.on_device, french.on_host) == (("w0",), ("w0",))
    assert adapter_cells(secret)[:6] == ("stub", "secret", "1", "1", "1.0", str(tokens))
    assert [row.adapter for row in adapter_rows(None, await scrape(3.0, "one"))] == ["french"]
    watch = FleetWatch(TopOptions())
    watch.update(now)
    assert [row.adapter for row in watch.adapters] == ["french", "secret"]
