"""LoRA adapters of a rank: equal to merged weights, and independent of each other."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints.adapters import merge_adapter, write_adapter
from tests.support.checkpoints.dense import VOCAB_SIZE, write_checkpoint
from tests.support.checkpoints.families import write_specimen
from tests.support.effort import IS_LONG
from tests.support.engines.adapter_engine import load_adapters
from tests.support.engines.plan_driver import Request, generate, make_runner
from tests.support.engines.threaded_group import run_ranks
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.plan.plan import AdapterLoad, AdapterRead, Plan
from worker.rank.runner import ModelRunner

pytestmark = pytest.mark.randomized  # with more merged weights
RANKS = (1, 3, 8, 16, 24, 4, 2, 12)
TARGETS = (
    *(("q_proj", "v_proj"), ("gate_proj", "down_proj"), ("up_proj",), ("k_proj", "o_proj")),
    *(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),) * 4,
)
OPTIONS = {"batch_invariant": True, "max_num_seqs": 40, "kv_cache_tokens": 8192}
LORA = {"enable_lora": True, "max_loras": len(RANKS), "max_lora_rank": 24}


@pytest.fixture(scope="module", params=["native", "torch"])
def options(request: pytest.FixtureRequest) -> dict[str, object]:
    """Options of a runner on each CPU backend."""
    return {**OPTIONS, "cpu_backend": request.param}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of unlike ranks, modules and scales."""
    folder = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(
            *(base, folder / str(number), rank),
            targets=TARGETS[number],
            seed=number,
            use_rslora=bool(number % 2),
        )
        for number, rank in enumerate(RANKS)
    ]


@pytest.fixture(scope="module")
def runner(base: Path, adapters: list[Path], options: dict[str, object]) -> ModelRunner:
    runner = make_runner(str(base), **LORA, **options)
    assert (runner.model.native is not None) == (options["cpu_backend"] == "native")
    load_adapters(runner, adapters)
    return runner


def requests(slot: int, adapter: int, count: int = 4) -> list[Request]:
    """Requests of one adapter that differ in prompt, arrival and length."""
    rng = np.random.default_rng(adapter)
    return [
        Request(
            prompt=rng.integers(0, VOCAB_SIZE, 5 + 9 * number).tolist(),
            new_tokens=6,
            slot=slot + number,
            arrival=number,
            adapter=adapter,
        )
        for number in range(count)
    ]


def test_eight_adapters_in_a_batch_equal_merged_weights_and_each_alone(
    base: Path,
    adapters: list[Path],
    options: dict[str, object],
    runner: ModelRunner,
    tmp_path: Path,
) -> None:
    batch = [requests(4 * number, number + 1) for number in range(len(RANKS))]
    plain = requests(36, 0)
    generate(runner, [*chain.from_iterable(batch), *plain], chunk=24)
    for number, (adapter, mine) in enumerate(zip(adapters, batch, strict=True), 1):
        alone = requests(0, number)[-1]
        alone.arrival = 0
        generate(runner, [alone], page_seed=number)
        assert alone.tokens == mine[-1].tokens
        assert torch.equal(torch.stack(alone.logits), torch.stack(mine[-1].logits))
        if number % 3 and not IS_LONG:
            continue
        merged = make_runner(str(merge_adapter(base, adapter, tmp_path / str(number))), **options)
        expected = requests(0, 0)
        for request, own in zip(expected, mine, strict=True):
            request.prompt = own.prompt
        generate(merged, expected)
        assert [request.tokens for request in expected] == [request.tokens for request in mine]
    without = make_runner(str(base), **options)
    expected = requests(0, 0)
    generate(without, expected)
    for request, own in zip(expected, plain, strict=True):
        assert torch.equal(torch.stack(request.logits), torch.stack(own.logits))
    assert len({str(mine[-1].tokens) for mine in [*batch, plain]}) == 1 + len(RANKS)


def test_bf16_in_the_compiled_library(
    base: Path, adapters: list[Path], runner: ModelRunner
) -> None:
    own = make_runner(str(base), dtype="bfloat16", cpu_backend="native", **LORA, **OPTIONS)
    load_adapters(own, adapters)
    for adapter in (1, 5, 8):
        found, expected = requests(0, adapter, 1)[0], requests(0, adapter, 1)[0]
        generate(own, [found])
        generate(runner, [expected])
        # Later tokens may differ.
        cosine = torch.cosine_similarity(found.logits[0], expected.logits[0], dim=0)
        assert cosine > 0.999


def test_cached_prefixes_and_chunks_change_no_bit(runner: ModelRunner) -> None:
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, VOCAB_SIZE, 70).tolist()
    whole = Request(prompt=prompt, slot=1, adapter=3)
    generate(runner, [whole])
    owner = Request(prompt=prompt, slot=2, adapter=3)
    cached = Request(prompt=prompt, slot=3, adapter=3, arrival=2, prefix_of=owner)
    other = Request(prompt=prompt, slot=4, adapter=5)
    generate(runner, [owner, cached, other], chunk=48)
    assert cached.pages[:4] == owner.pages[:4]
    for request in (owner, cached):
        assert torch.equal(torch.stack(request.logits), torch.stack(whole.logits))
    assert other.tokens != whole.tokens


def test_two_ranks_hold_their_slices(
    base: Path, adapters: list[Path], options: dict[str, object], runner: ModelRunner
) -> None:
    """Columns of A for row-parallel layers, rows of B for the parts of column-parallel ones."""
    numbers = (2, 4, 5)

    def run(group: TensorParallelGroup) -> list[Request]:
        own = make_runner(str(base), group, tensor_parallel_size=2, **LORA, **options)
        load_adapters(own, [adapters[number - 1] for number in numbers])
        found = [requests(slot, slot, 1)[0] for slot in range(4)]
        for request, number in zip(found[1:], numbers, strict=True):
            request.prompt = requests(0, number, 1)[0].prompt
        generate(own, found)
        return found

    first, second = run_ranks(2, run)
    assert [request.tokens for request in first] == [request.tokens for request in second]
    expected = [requests(slot, number, 1)[0] for slot, number in enumerate((0, *numbers))]
    generate(runner, expected)
    for mine, alone in zip(first, expected, strict=True):
        assert mine.tokens == alone.tokens
        actual, wanted = torch.stack(mine.logits), torch.stack(alone.logits)
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=0)


def test_slots_and_host_copies_are_replaced(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    """A key that is read again has new weights; one that cannot be read does not stop the rank."""
    options = {**LORA, "max_loras": 1, **OPTIONS}
    runner = make_runner(str(base), **options)

    def tokens(load: AdapterLoad | None = None, **plan: object) -> list[int]:
        loads = [] if load is None else [load]
        runner.execute(Plan(0, [], [], [], adapter_loads=loads, **plan))
        request = requests(0, 1, 1)[0]
        generate(runner, [request])
        return request.tokens

    load_adapters(runner, adapters[:1])
    first = tokens()
    second = tokens(AdapterLoad(1, 2), adapter_reads=[AdapterRead(2, str(adapters[4]))])
    assert first != second
    assert tokens(AdapterLoad(1, 1)) == first
    reads = [AdapterRead(3, str(tmp_path))]
    plan, ended = Plan(0, [], [], [], adapter_reads=reads, adapter_drops=[2]), []
    while not ended:
        ended = runner.execute(plan).adapters_read
        plan = Plan(0, [], [], [])
    assert tokens() == first
    with pytest.raises(ValueError, match=r"has no adapter_config.json"):
        runner.execute(Plan(0, [], [], [], adapter_loads=[AdapterLoad(1, 3)]))
    [failed] = ended
    assert (failed.key, failed.error.split(" has ")[1][:23]) == (3, "no adapter_config.json:")


Q_K_V_O, GATE_UP_DOWN = "q_proj k_proj v_proj o_proj", "gate_proj up_proj down_proj"
PROJECTIONS = {
    "glm4": {"self_attn": Q_K_V_O, "mlp": "gate_up_proj down_proj"},
    "internlm2": {"attention": "wqkv wo", "feed_forward": "w1 w2 w3"},
    "phi3": {"self_attn": "qkv_proj o_proj", "mlp": "gate_up_proj down_proj"},
    "starcoder2": {"self_attn": Q_K_V_O, "mlp": "c_fc c_proj"},
    "gemma3": {"self_attn": Q_K_V_O, "mlp": GATE_UP_DOWN},
    "qwen3-next": {
        "linear_attn": "in_proj_ba in_proj_qkvz out_proj",
        "self_attn": Q_K_V_O,
        "mlp": GATE_UP_DOWN,
        "shared_expert": GATE_UP_DOWN,
    },
    "deepseek-v3": {
        "self_attn": "q_a_proj q_b_proj kv_a_proj_with_mqa o_proj",
        "mlp": GATE_UP_DOWN,
        "shared_experts": GATE_UP_DOWN,
    },
    "lfm2": {
        "conv": "in_proj out_proj",
        "self_attn": "q_proj k_proj v_proj out_proj",
        "feed_forward": "w1 w2 w3",
    },
    "falcon-h1": {
        "mamba": "in_proj out_proj",
        "self_attn": Q_K_V_O,
        "feed_forward": GATE_UP_DOWN,
    },
    "gemma3n": {"self_attn": Q_K_V_O, "mlp": GATE_UP_DOWN},
    "gemma4-small": {"self_attn": Q_K_V_O, "mlp": GATE_UP_DOWN},
}
"""Projections that adapters may have, by block."""
SHARING = {"gemma3n": (3, 4), "gemma4-small": (4, 5)}
"""Layers that use the KV cache of another layer, whose own projections to it are unused."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("glm4", "internlm2") else pytest.mark.long)
        for name in PROJECTIONS
    ],
)
def test_adapters_of_all_projections_equal_merged_weights(name: str, tmp_path: Path) -> None:
    """Glm4: interleaved rotary dimensions, gate and up in one tensor. InternLM2: groups of
    heads."""
    base = tmp_path / "base"
    base.mkdir()
    write_specimen(name, base)
    runner = make_runner(str(base), enable_lora=True, cpu_backend="torch")
    assert runner._adapters is not None
    modules = tuple(runner._adapters.modules)
    ends = tuple(
        f".{block}.{projection}.weight"
        for block, projections in PROJECTIONS[name].items()
        for projection in projections.split()
    )
    stored = load_file(base / "model.safetensors")
    supported = {key.removesuffix(".weight") for key in stored if key.endswith(ends)}
    assert set(modules) == supported - {
        f"model.layers.{layer}.self_attn.{projection}"
        for layer in SHARING.get(name, ())
        for projection in ("k_proj", "v_proj")
    }
    adapter = write_adapter(base, tmp_path / "adapter", 4, targets=modules)
    load_adapters(runner, [adapter])
    mine, expected = requests(0, 1, 2), requests(0, 0, 2)
    for request, other in zip(mine, expected, strict=True):
        other.prompt = request.prompt = [token % 100 for token in request.prompt]
    generate(runner, mine)
    merged = merge_adapter(base, adapter, tmp_path / "merged")
    generate(make_runner(str(merged), cpu_backend="torch"), expected)
    for request, other in zip(mine, expected, strict=True):
        assert request.tokens == other.tokens
        actual, wanted = torch.stack(request.logits), torch.stack(other.logits)
        torch.testing.assert_close(actual, wanted, atol=1e-3, rtol=0)


def test_adapters_of_embedding_and_head_equal_merged_weights(tmp_path: Path) -> None:
    """On one rank and on two, which share the vocabulary of odd size; beside rows without."""
    base = tmp_path / "base"
    write_checkpoint("qwen3", base, tie_word_embeddings=False)
    targets = (("embed_tokens", "lm_head", "q_proj"), ("lm_head",), ("embed_tokens",), ("o_proj",))
    folders = [
        write_adapter(base, tmp_path / str(number), 3 + number, targets=own, seed=number)
        for number, own in enumerate(targets)
    ]
    options = {**LORA, "enable_lora_embeddings": True, **OPTIONS}

    def run(group: TensorParallelGroup | None = None) -> list[Request]:
        size = 1 if group is None else group.world_size
        runner = make_runner(str(base), group, tensor_parallel_size=size, **options)
        load_adapters(runner, folders)
        found = [requests(slot, slot, 1)[0] for slot in range(len(targets) + 1)]
        generate(runner, found, chunk=24)
        return found

    found = run()
    for number, (request, other) in enumerate(zip(found, run_ranks(2, run)[0], strict=True)):
        folder = (
            merge_adapter(base, folders[number - 1], tmp_path / f"m{number}") if number else base
        )
        expected = requests(0, number, 1)
        expected[0].adapter = 0
        generate(make_runner(str(folder), **OPTIONS), expected)
        wanted = torch.stack(expected[0].logits)
        for mine in (request, other):
            assert mine.tokens == expected[0].tokens
            torch.testing.assert_close(torch.stack(mine.logits), wanted, atol=1e-4, rtol=0)
    assert len({str(request.tokens) for request in found}) == len(found)
