"""Multi-head latent attention: its cache on each rank and in host memory, FP8 weights, and
unsupported settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import Expansion
from kernels.mla_prefill import base as mla_prefill
from tests.support.checkpoints.families import write_specimen
from tests.support.checkpoints.fp8 import QUANTIZATION, dequantize, quantize
from tests.support.checkpoints.specimen import VOCAB_SIZE
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.engines.plan_driver import Request, generate, make_runner
from tests.support.worker.real_configs import load_corpus
from worker.models.config.model_config import ModelConfig, load_model_config
from worker.models.layers.kv_cache import layout_of
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.loader import build_model
from worker.protocol.sampling import SamplingParams
from worker.rank.kv_cache import allocate_kv_caches

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = Path(tmp_path_factory.mktemp("deepseek"))
    write_specimen("deepseek-v3", folder)
    return folder


def test_released_models_keep_576_values_of_a_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    names = {"DeepSeek-V3.1", "DeepSeek-V2-Lite-Chat", "Kimi-K2-Instruct", "GLM-4.7-Flash"}
    found = [real for real in load_corpus() if real.name.split("/")[-1] in names]
    assert len(found) == len(names)
    for real in found:
        mla = ModelConfig.parse(dict(real.config), tmp_path).mla
        assert mla is not None
        assert mla.cached_dim == 576


def test_every_rank_keeps_a_tokens_latents_once(folder: Path) -> None:
    """20 values of the latent vector and 8 that rotate, whatever the number of heads and ranks."""
    for world_size in (1, 2, 4):
        group = TensorParallelGroup(
            rank=world_size - 1, world_size=world_size, device=CPU, process_group=None
        )
        options = LayerOptions(group=group, dtype=torch.bfloat16, device=CPU, batch_invariant=False)
        model = build_model(load_model_config(str(folder)), options, 64)
        layout = layout_of(model.layers)
        assert layout.page_bytes(16) == 16 * 28 * 2 * 3
        caches = allocate_kv_caches(5, 16, layout, CPU).values()
        assert [[plane.shape for plane in cache.planes] for cache in caches] == 3 * [
            [(5, 16, 1, 28)]
        ]


def test_a_prefix_that_went_to_the_host_is_a_hit(folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, VOCAB_SIZE, (3, 100), generator=generator).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    options = {"host_cache_gib": 0.01, "host_cache_policy": "always", "max_num_seqs": 2}
    with Engine(str(folder), kv_cache_tokens=192, **options) as engine:
        first = engine.generate([prompts[0]], sampling)
        engine.generate(prompts[1:], sampling)
        cache = engine.core.scheduler.take_report().load.host_cache
        assert cache is not None
        loaded_before = cache.num_loaded
        for plane in engine.runner._kv_caches[0].planes:
            plane.zero_()  # the prompt's cached part comes from the host
        assert engine.generate([prompts[0]], sampling) == first
        cache = engine.core.scheduler.take_report().load.host_cache
        assert cache is not None
        assert cache.num_loaded - loaded_before == 6, "all pages of the prompt"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_batch_invariant_outputs_are_bitwise_equal(folder: Path, ranks: int) -> None:
    """Log-probabilities, too, which show differences that near ties hide: alone and together, with
    prefix hits and in chunks."""
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (3, 37, 64, 150)
    ]
    sampling = [
        SamplingParams(
            temperature=0.9 * (seed % 2), seed=seed, max_tokens=9, ignore_eos=True, logprobs=3
        )
        for seed in range(len(prompts))
    ]

    def run(times: int = 1, *, together: bool = True, **options: Any) -> list[list[Outcome]]:
        settings = {"batch_invariant": True, "tensor_parallel_size": ranks, **options}
        with Engine(str(folder), kv_cache_tokens=1024, **settings) as engine:
            if together:
                return [engine.outcomes(prompts, sampling) for _ in range(times)]
            pairs = zip(prompts, sampling, strict=True)
            return [[engine.outcomes([prompt], [one])[0] for prompt, one in pairs]]

    (alone,) = run(together=False, enable_prefix_caching=False)
    assert run(2) == [alone, alone]
    assert run(max_num_batched_tokens=32) == [alone]


def expand_rows(patch: pytest.MonkeyPatch, rows: list[tuple[int, int]]) -> None:
    """Rows of more than three queries are in expanded form, in pieces of 7 keys; notes them."""

    def note(_: Expansion, num_queries: int, seq_len: int) -> bool:
        if num_queries > 3:
            rows.append((num_queries, seq_len))
        return num_queries > 3

    patch.setattr(Expansion, "saves_work", note)
    patch.setattr(mla_prefill, "_PIECE_BYTES", 1)
    patch.setattr(mla_prefill, "_MIN_KEYS", 7)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deepseek-v3", {}),
        ("deepseek-v2-lite", {"kv_cache_dtype": "fp8"}),
        pytest.param("mistral4", {}, marks=pytest.mark.long),
        pytest.param("longcat", {}, marks=pytest.mark.long),
    ],
)
def test_prompts_in_expanded_form_have_the_same_logits(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, in chunks, after a prefix, and in steps with decodes and prompts that are not
    expanded."""
    torch.set_num_threads(1)
    write_specimen(name, tmp_path)

    def logits() -> torch.Tensor:
        first = Request(prompt=list(range(3, 43)))
        requests = [
            first,
            Request(prompt=[7, 3, 9], slot=1, arrival=1),
            Request(prompt=[*range(3, 43), 5, 6], slot=2, arrival=4, prefix_of=first),
        ]
        generate(make_runner(str(tmp_path), **options), requests, chunk=16)
        return torch.stack([row for request in requests for row in request.logits])

    expected, rows = logits(), list[tuple[int, int]]()
    expand_rows(monkeypatch, rows)
    torch.testing.assert_close(logits(), expected, rtol=2e-5, atol=2e-5)
    assert (16, 32) in rows


def write_fp8(folder: Path, own: Path, dequantized: Path) -> None:
    """The checkpoint with its linear weights in FP8, and dequantized."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    plain = dict(tensors)
    linear = [key for key in tensors if "proj" in key or "indexer.w" in key]
    for key in [key for key in linear if "weights_proj" not in key]:  # as released
        tensors[key], tensors[f"{key}_scale_inv"] = values, scales = quantize(tensors[key])
        plain[key] = dequantize(values, scales)
    for path, state, more in (
        (own, tensors, {"quantization_config": QUANTIZATION}),
        (dequantized, plain, {}),
    ):
        path.mkdir()
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps({**config, **more}))


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "deepseek-v2-lite", pytest.param("glm-5", marks=pytest.mark.long)]
)
def test_fp8_weights_are_what_the_dequantized_ones_are(name: str, tmp_path: Path) -> None:
    """Including weights that are absorbed, weights whose rows end within a block, and an
    indexer's."""
    write_specimen(name, tmp_path)
    write_fp8(tmp_path, tmp_path / "fp8", tmp_path / "plain")
    found = []
    for folder in ("fp8", "plain"):
        request = Request(prompt=[5, 17, 30, 4, 8, 90, 3, 2, 61, 77, 12])
        generate(make_runner(str(tmp_path / folder)), [request])
        found.append(torch.stack(request.logits))
    assert torch.equal(*found)


def test_the_compiled_library_is_rejected(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"--cpu-backend native cannot run this model \(Deepseek"):
        make_runner(str(folder), cpu_backend="native")
