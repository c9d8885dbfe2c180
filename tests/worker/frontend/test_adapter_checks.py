"""Adapters are checked before a worker uses them: folders, contents, versions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.worker.played_engine import INFO
from worker.core import adapter_folder
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
    entry = {"dtype": "F32", "shape": [len(weights), 1], "data_offsets": [0, len(weights)]}
    write_header(folder, {"a": entry}, weights)
    return str(folder)


def write_header(folder: Path, header: Any, data: bytes = b"") -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(encoded).to_bytes(8, "little")
    (folder / "adapter_model.safetensors").write_bytes(size + encoded + data)


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


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE: dict[str, tuple[Any, str]] = {
    "huge": ({"a": {**ENTRY, "data_offsets": [0, 1 << 40]}}, "but its header specifies 1099511"),
    "long": ({"a": ENTRY}, "has 78 bytes, but its header specifies 77: copy it again"),
    "integers": ({"a": {**ENTRY, "dtype": "I64"}}, "a in adapter_model.safetensors has type I64"),
    "FP8": ({"a": {**ENTRY, "dtype": "F8_E4M3"}}, "has type F8_E4M3, but only BF16, F16, F32"),
    "no entry": ({"a": 3}, "corrupt: the header entry for a"),
    "offsets": ({"a": {**ENTRY, "data_offsets": [0, True, 8]}}, "the header entry for a"),
    "no object": ([1], "its header is not a JSON object"),
    "deep": (b"[" * 99999, "not a safetensors file"),
    "no JSON": (bytes(9), "not a safetensors file"),
    "no UTF-8": (b'{"\xff": 1}', "not a safetensors file"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_rejected_before_the_weights_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_folder, "adapter_version", None)  # it reads the whole file
    header, message = HOSTILE[name]
    folder = write(tmp_path / "a")
    write_header(tmp_path / "a", header, bytes(9))
    assert message in check_adapter(folder, 16).problem


def test_a_million_tensors_and_files_without_end_are_rejected_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_folder, "adapter_version", None)
    folder, weights = write(tmp_path / "a"), tmp_path / "a" / "adapter_model.safetensors"
    with weights.open("wb") as file:  # sparse: a header of 10^6 entries, and a TB of weights
        file.write((150 * 10**6).to_bytes(8, "little"))
        file.truncate(1 << 40)
    assert "has 150000000 bytes, but at most" in check_adapter(folder, 16).problem
    for target in ("/dev/zero", "adapter_model.safetensors", "/no/such/file"):  # a loop, too
        weights.unlink()
        weights.symlink_to(target)
        assert "has no adapter_model.safetensors" in check_adapter(folder, 16).problem
    weights.unlink()
    os.mkfifo(weights)
    assert "has no adapter_model.safetensors" in check_adapter(folder, 16).problem
    config = tmp_path / "a" / "adapter_config.json"
    config.unlink()
    config.symlink_to("/dev/zero")
    assert "has no adapter_config.json" in check_adapter(folder, 16).problem


@given(st.data())
def test_damaged_folders_are_a_problem_or_have_a_version(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """No damage to either file raises another error."""
    folder = tmp_path_factory.mktemp("damaged")
    write(folder)
    file = folder / data.draw(st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    check = check_adapter(str(folder), 16)
    assert bool(check.problem) != bool(check.version)


async def test_requests_of_another_version_than_the_folder_s_are_rejected(tmp_path: Path) -> None:
    checks = AdapterChecks()
    folder = write(tmp_path / "a")
    check = await checks.check(folder, LORA)
    good = AdapterRef("a", folder, check.version)
    old, missing = AdapterRef("a", folder, "old"), AdapterRef("b", "/none", "v")
    submits = [request(good, "1"), request(old, "2"), request(missing, "3"), request(None, "4")]
    rejections = {r.request_id: r for r in await checks.rejections(submits, LORA)}
    assert rejections.keys() == {"2", "3"}
    assert "has changed: load the adapter again" in rejections["2"].message
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

    assert await check(None) == AdapterCheck()
    found = await check(LORA)
    assert found is not None
    assert found == check_adapter(str(tmp_path / "a"), 16)
