"""Adapters are checked before a worker uses them: folders, contents, versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.worker.played_engine import INFO
from worker.core.adapter_folder import check_adapter, static_adapters
from worker.frontend.adapters import AdapterChecks
from worker.frontend.server import WorkerFrontend
from worker.protocol.adapters import AdapterCheck, AdapterRef
from worker.protocol.messages import EngineInfo, Submit, SubmitBatch, SubmitReply

LORA = msgspec.structs.replace(INFO, max_loras=2, max_lora_rank=16)


def write(folder: Path, weights: bytes = b"weights", **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def request(ref: AdapterRef | None, request_id: str = "r") -> Submit:
    return Submit(request_id=request_id, gateway_id="g", prompt=bytes(8), adapter=ref)


def test_a_version_is_the_content_of_both_files(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / "a"),
        write(tmp_path / "b"),
        write(tmp_path / "c", b"other weights"),
        write(tmp_path / "d", lora_alpha=32),
    ]
    versions = [check_adapter(folder, 16).version for folder in folders]
    assert versions[0] == versions[1]
    assert len(set(versions)) == 3
    assert all(len(version) == 32 for version in versions)


def test_what_cannot_be_served_is_a_problem_with_a_reason(tmp_path: Path) -> None:
    assert "adapter_config.json" in check_adapter(str(tmp_path / "none"), 16).problem
    large = write(tmp_path / "large", r=64)
    assert "--max-lora-rank" in check_adapter(large, 16).problem
    (tmp_path / "large" / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors" in check_adapter(large, 64).problem
    with pytest.raises(ValueError, match="--lora-modules: big: rank 64"):
        static_adapters({"big": large}, 16)
    [ref] = static_adapters({"small": write(tmp_path / "small")}, 16)
    assert ref == AdapterRef("small", str(tmp_path / "small"), ref.version)


async def test_requests_of_another_version_than_the_folder_s_are_rejected(tmp_path: Path) -> None:
    checks = AdapterChecks()
    folder = write(tmp_path / "a")
    check = await checks.check(folder, LORA)
    good = AdapterRef("a", folder, check.version)
    old, missing = AdapterRef("a", folder, "old"), AdapterRef("b", "/none", "v")
    submits = [request(good, "1"), request(old, "2"), request(missing, "3"), request(None, "4")]
    rejections = {r.request_id: r for r in await checks.rejections(submits, LORA)}
    assert rejections.keys() == {"2", "3"}
    assert "has changed: load it again" in rejections["2"].message
    assert {rejection.status for rejection in rejections.values()} == {503}
    write(tmp_path / "a", b"newer")  # its requests go on with the weights read before
    assert not await checks.rejections([request(good)], LORA)
    for info, problem in ((None, "loading"), (INFO, "--enable-lora")):
        [rejection] = await AdapterChecks().rejections([request(good)], info)
        assert problem in rejection.message


async def test_a_frontend_checks_folders_for_gateways(tmp_path: Path) -> None:
    front = WorkerFrontend("w")

    async def check(info: EngineInfo | None) -> AdapterCheck | None:
        front.info = info
        batch = SubmitBatch(check_adapter=write(tmp_path / "a"))
        reply = await front.submit(msgspec.msgpack.encode(batch))
        return msgspec.msgpack.decode(reply, type=SubmitReply).adapter

    assert await check(None) == AdapterCheck(problem="this worker is loading")
    found = await check(LORA)
    assert found is not None
    assert found == check_adapter(str(tmp_path / "a"), 16)
