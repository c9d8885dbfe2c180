"""Resolution of `--dtype auto`, by checkpoint, device and processor."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.native import build, has_bf16_products, precision
from tests.support.checkpoints.dense import write_checkpoint
from worker.config import EngineConfig
from worker.models.config.model_config import load_model_config
from worker.models.config.quantization import QuantizationConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.rank import dtype as rank_dtype
from worker.rank.dtype import prefers_bf16, resolve_cache_dtype, resolve_dtype
from worker.rank.rank import Rank, select_device


class Voters(TensorParallelGroup):
    """Two ranks, of which the other one votes for float32."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.device = 0, 2, torch.device("cpu")

    def all_reduce(self, tensor: torch.Tensor, *, fixed_order: bool = False) -> torch.Tensor:
        return tensor


def resolve(stored: str | None, group: TensorParallelGroup | None = None, **options: Any) -> str:
    config = EngineConfig.of(model="any", **options)
    group = group or TensorParallelGroup.alone(torch.device("cpu"))
    return str(resolve_dtype(config, stored, group)).removeprefix("torch.")


@pytest.fixture
def speedups(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """By matmul implementation, on a processor with bfloat16 instructions."""
    found = {"native": 2.0, "torch": 1.5}
    monkeypatch.setattr(rank_dtype, "has_bf16_products", lambda: True)
    monkeypatch.setattr(rank_dtype, "bf16_speedup", lambda multiplier: found[multiplier])
    return found


def test_cpus_take_bfloat16_where_it_is_stored_and_quicker(speedups: dict[str, float]) -> None:
    assert resolve("bfloat16") == "bfloat16"
    assert [resolve(stored) for stored in ("float32", "float16", None)] == ["float32"] * 3
    speedups["torch"] = 0.9
    assert resolve("bfloat16") == "float32"  # the library may not support the model
    assert resolve("bfloat16", cpu_backend="native") == "bfloat16"
    assert resolve("bfloat16", cpu_backend="torch") == "float32"
    assert resolve("bfloat16", cpu_backend="torch", dtype="bfloat16") == "bfloat16"


@pytest.mark.usefixtures("speedups")
def test_no_measurement_decides_in_batch_invariant_mode() -> None:
    assert resolve("bfloat16", batch_invariant=True) == "float32"


@pytest.mark.usefixtures("speedups")
def test_ranks_agree() -> None:
    assert resolve("bfloat16", Voters()) == "float32"


def test_a_processor_without_products_of_bfloat16_is_not_measured(
    speedups: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_dtype, "has_bf16_products", lambda: False)
    speedups.clear()
    assert resolve("bfloat16") == "float32"
    assert prefers_bf16("auto")[1].startswith("this processor has no bfloat16 instructions")


@pytest.mark.parametrize(
    ("processor", "limit", "expected"),
    [
        ("flags : avx512f avx512_bf16 avx2", "", True),
        ("flags : avx512f amx_bf16", "AVX512_CORE_BF16", True),
        ("flags : avx512f avx512_bf16", "AVX512_CORE", False),
        ("flags : avx512f avx2", "", False),
        ("Features : fp asimd bf16", "", True),
    ],
)
def test_flags_tell_what_a_processor_multiplies(
    processor: str, limit: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "processor", lambda: processor)
    monkeypatch.setenv(build.MAX_CPU_ISA, limit)
    assert has_bf16_products() == expected


def test_a_processor_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(precision, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(precision, "_measure", lambda who: measured.append(who) or 1.234)
    assert [precision.bf16_speedup("torch") for _ in range(2)] == [1.23, 1.23]
    assert measured == ["torch"]
    monkeypatch.setattr(precision, "processor", lambda: "another one")
    precision.bf16_speedup("torch")
    assert measured == ["torch", "torch"]
    for kept in tmp_path.iterdir():
        kept.write_text("half a li")
    precision.bf16_speedup("torch")
    assert len(measured) == 3


def test_what_is_measured_are_products() -> None:
    assert all(0.05 < precision._measure(who) < 50 for who in ("native", "torch"))


@pytest.mark.usefixtures("speedups")
def test_an_engine_computes_in_what_auto_takes(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    config = EngineConfig.of(model=str(tmp_path), device="cpu", cpu_threads=1, kv_cache_tokens=64)
    hello = Rank(config).load(TensorParallelGroup.alone(torch.device("cpu")))
    assert hello.dtype == "bfloat16"


def test_checkpoints_name_their_type(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.pop("dtype")
    for written, expected in (
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": 16}, None),
        ({}, None),
    ):
        path.write_text(json.dumps(config | written))
        assert load_model_config(str(tmp_path)).dtype == expected


@pytest.fixture
def t4(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The properties of one GPU, to change."""
    properties = SimpleNamespace(name="Tesla T4", major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return properties


def test_gpus_below_8_0_are_rejected_with_their_name(t4: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"Tesla T4 has compute capability 7\.5.*8\.0"):
        select_device(EngineConfig.of(model="any"), 0)
    assert select_device(EngineConfig.of(model="any", device="cpu"), 0).type == "cpu"
    t4.major, t4.minor = 8, 0
    assert select_device(EngineConfig.of(model="any"), 0).type == "cuda"


def test_cuda_takes_the_checkpoints_type(monkeypatch: pytest.MonkeyPatch) -> None:
    group = TensorParallelGroup.alone(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    stored = ("bfloat16", "float16", "float32", None)
    expected = ["bfloat16", "float16", "bfloat16", "bfloat16"]
    assert [resolve(name, group) for name in stored] == expected
    assert resolve("bfloat16", group, batch_invariant=True) == "bfloat16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    assert [resolve(name, group) for name in stored] == ["float16"] * 4


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("capability", "options", "specified", "expected"),
    [
        ((9, 0), {}, False, None),
        ((9, 0), {}, True, FP8),
        ((8, 0), {}, True, None),
        ((9, 0), {"attention_backend": "flash"}, True, None),
        ((9, 0), {"kv_cache_dtype": "bfloat16"}, True, None),
        ((8, 9), {"kv_cache_dtype": "fp8"}, False, FP8),
        (None, {"kv_cache_dtype": "fp8_e4m3"}, False, FP8),
        (None, {}, True, None),
    ],
)
def test_a_cache_is_fp8_if_requested_or_specified(
    capability: tuple[int, int] | None,
    options: dict[str, Any],
    specified: bool,
    expected: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On GPUs that support it; no compute capability means CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert cache_dtype(capability, options, specified) == expected


def test_gpus_below_8_9_have_no_fp8_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(ValueError, match=r"needs a GPU with compute capability 8\.9 .* has 8\.6"):
        cache_dtype((8, 6), {"kv_cache_dtype": "fp8"}, True)


def cache_dtype(
    capability: tuple[int, int] | None,
    options: dict[str, Any],
    specified: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.dtype | None:
    model: Any = SimpleNamespace(
        quantization=QuantizationConfig(weights=None, has_fp8_cache=specified)
    )
    device = torch.device("cpu" if capability is None else "cuda")
    return resolve_cache_dtype(EngineConfig.of(model="any", **options), model, device, dtype)


def test_a_bfloat16_cache_needs_a_model_in_bfloat16() -> None:
    with pytest.raises(ValueError, match="needs --dtype bfloat16, but this model uses float16"):
        cache_dtype(None, {"kv_cache_dtype": "bfloat16"}, False, torch.float16)


def test_the_compiled_library_has_no_fp8_caches() -> None:
    assert EngineConfig.of(model="any", kv_cache_dtype="bfloat16").cpu_steps == "auto"
    assert EngineConfig.of(model="any", kv_cache_dtype="fp8").cpu_steps == "torch"
    with pytest.raises(ValueError, match="native does not support --kv-cache-dtype fp8"):
        EngineConfig.of(model="any", kv_cache_dtype="fp8", cpu_backend="native")
