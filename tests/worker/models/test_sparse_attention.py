"""Models with sparse attention: caches of index keys, rows below the selection's size, bitwise
equal outputs of batch-invariant engines, and keys of config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints.families import write_specimen
from tests.support.checkpoints.specimen import VOCAB_SIZE
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.engines.plan_driver import Request, generate, make_runner
from tests.support.worker.real_configs import load_corpus
from worker.config import EngineConfig
from worker.models.config.model_config import ModelConfig, load_model_config
from worker.models.layers.kv_cache import KVCacheSpec, layout_of
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.loader import build_model
from worker.plan.plan import PageCopies, Plan
from worker.protocol.sampling import SamplingParams
from worker.rank.host_pages import CPUHostPages
from worker.rank.kv_cache import allocate_kv_caches
from worker.rank.preflight import check_draft_model

CPU = torch.device("cpu")
LENGTHS = (3, 8, 37, 90)
"""The specimen's queries attend to 8 tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = Path(tmp_path_factory.mktemp("glm-5"))
    write_specimen("glm-5", folder)
    return folder


def changed(folder: Path, copy: Path, **keys: Any) -> Path:
    """The checkpoint with changed keys in its config.json."""
    shutil.copytree(folder, copy)
    file = copy / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return copy


def test_layers_with_an_indexer_keep_its_keys_beside_the_latents(folder: Path) -> None:
    """28 values of latents in each of 4 layers, 16 of index keys in two; in FP8 caches, index keys
    keep the model's type."""
    for cache_dtype, num_bytes in ((None, 2), (torch.float8_e4m3fn, 1)):
        group = TensorParallelGroup(rank=1, world_size=2, device=CPU, process_group=None)
        options = LayerOptions(
            group=group,
            dtype=torch.bfloat16,
            device=CPU,
            batch_invariant=False,
            cache_dtype=cache_dtype,
        )
        layout = layout_of(build_model(load_model_config(str(folder)), options, 64).layers)
        assert layout.page_bytes(16) == 16 * (4 * 28 * num_bytes + 2 * 16 * 2)
        caches = allocate_kv_caches(5, 16, layout, CPU)
        assert [len(cache.planes) for cache in caches.values()] == [2, 1, 2, 1]
        index_keys = caches[2].index_keys
        assert index_keys is not None
        assert (index_keys.shape, index_keys.dtype) == ((5, 16, 1, 16), torch.bfloat16)


def test_host_memory_holds_planes_of_several_types() -> None:
    planes = [torch.randn(4, 2, 3).to(torch.float8_e4m3fn), torch.randn(4, 2, 5).bfloat16()]
    before = [plane.clone() for plane in planes]
    host = CPUHostPages(3, planes)
    host.copy(Plan(0, [], [], [], stores=PageCopies([1, 3], [2, 0])))
    host.copy(Plan(1, [], [], [], loads=PageCopies([0, 2], [2, 0])))
    for plane, old in zip(planes, before, strict=True):
        assert plane[[0, 2]].tolist() == old[[1, 3]].tolist()


def test_rows_below_the_selections_size_take_the_dense_path(folder: Path, tmp_path: Path) -> None:
    """Bitwise equal to a checkpoint that only differs in having no indexer."""
    sparse = changed(folder, tmp_path / "sparse", index_topk=64)
    request = Request(prompt=list(range(3, 43)), new_tokens=9)
    generate(make_runner(str(sparse)), [request], chunk=16)
    dense = Request(prompt=request.prompt, new_tokens=9)
    with pytest.MonkeyPatch.context() as patches:
        for name in ("attend_to_cells", "select_tokens"):
            for module in ("architectures.deepseek", "layers.indexer"):
                patches.setattr(f"worker.models.{module}.{name}", None, raising=False)
        patches.setattr("worker.rank.batch.split_rows", None)
        spec = KVCacheSpec
        patches.setattr(
            "worker.models.architectures.deepseek.KVCacheSpec",
            lambda **fields: spec(**{**fields, "top_k": 0}),
        )
        generate(make_runner(str(sparse)), [dense], chunk=16)
    assert torch.equal(torch.stack(request.logits), torch.stack(dense.logits))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("glm-5", 1),
        pytest.param("glm-5", 2, marks=pytest.mark.long),
        pytest.param("minimax-m3", 1, marks=pytest.mark.long),
        pytest.param("minimax-m3", 2, marks=pytest.mark.long),
    ],
)
def test_batch_invariant_outputs_are_bitwise_equal(
    folder: Path, name: str, ranks: int, tmp_path: Path
) -> None:
    """Including log-probabilities: of requests alone and together, with prefix hits and in
    chunks."""
    if name != "glm-5":
        folder = tmp_path
        write_specimen(name, folder)
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS
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


def layers_of(folder: Path) -> str:
    """F for a layer with an indexer, S for one without."""
    mla = load_model_config(str(folder)).mla
    assert mla is not None
    assert mla.indexer is not None
    return "".join("SF"[full] for full in mla.indexer.layers)


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"index_topk_pattern": "FSSF"}, "FSSF"),
        ({"index_topk_pattern": ["full", "full", "shared", "full"]}, "FFSF"),
        ({"index_topk_freq": 2}, "FFSF"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, "FSSS"),
        ({}, "FFFF"),
    ],
)
def test_layers_with_an_indexer(
    folder: Path, tmp_path: Path, keys: dict[str, Any], layers: str
) -> None:
    assert layers_of(changed(folder, tmp_path / "x", indexer_types=None, **keys)) == layers


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types"),
        ({"indexer_types": ["full"]}, "indexer_types"),
        ({"indexer_types": None, "index_topk_pattern": "FFXF"}, "index_topk_pattern"),
        (
            {"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 0},
            "index_skip_topk_offset",
        ),
        ({"index_head_dim": 4}, "index_head_dim"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
    ],
)
def test_unsupported_indexers_are_refused(
    folder: Path, tmp_path: Path, keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"^{named} .*in config.json"):
        load_model_config(str(changed(folder, tmp_path / "x", **keys)))


def test_released_models_have_the_indexers_of_their_configurations(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    expected = {
        "deepseek-ai/DeepSeek-V3.2": (64, 61),
        "zai-org/GLM-5": (32, 78),
        "zai-org/GLM-5.2": (32, 21),
    }
    for real in load_corpus():
        if real.name in expected:
            mla = ModelConfig.parse(dict(real.config), tmp_path).mla
            assert mla is not None
            assert mla.indexer is not None
            assert mla.indexer.top_k == 2048
            found = mla.indexer.num_heads, sum(mla.indexer.layers)
            assert found == expected.pop(real.name)
    assert not expected


def test_a_draft_model_must_attend_to_all_tokens(folder: Path) -> None:
    config = EngineConfig.of(
        model=str(folder), speculative_method="draft", speculative_model=str(folder)
    )
    with pytest.raises(ValueError, match="--speculative-model: sparse attention"):
        check_draft_model(config, load_model_config(str(folder)), max_model_len=64)
