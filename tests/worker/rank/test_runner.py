"""The runner's limits, empty Plans, batch invariance and seeded samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints.dense import VOCAB_SIZE, write_checkpoint
from tests.support.engines.plan_driver import PAGE_SIZE, Request, generate, make_runner
from worker.plan.plan import Plan
from worker.rank.batch import Batch
from worker.rank.runner import ModelRunner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen3")
    torch.set_num_threads(1)
    write_checkpoint("qwen3", Path(folder))
    return str(folder)


@pytest.fixture(scope="module", params=["native", "torch"])
def invariant(request: pytest.FixtureRequest, folder: str) -> ModelRunner:
    return make_runner(folder, batch_invariant=True, cpu_backend=request.param)


def prompt(length: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()
    return tokens


def others() -> list[Request]:
    return [
        Request(prompt=prompt(length, 9), slot=slot, arrival=slot, new_tokens=9)
        for slot, length in ((0, 5), (1, 120), (2, 41), (4, 300))
    ]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.8])
def test_batch_invariance_is_bitwise(invariant: ModelRunner, temperature: float) -> None:
    def request(slot: int = 3, arrival: int = 0) -> Request:
        return Request(
            prompt=prompt(157),
            new_tokens=8,
            slot=slot,
            arrival=arrival,
            temperature=temperature,
            top_p=0.9,
            top_k=50,
            seed=77,
        )

    alone = request()
    generate(invariant, [alone])
    chunked = request(slot=6)
    generate(invariant, [chunked], chunk=32, page_seed=4)
    batched = request(arrival=2)
    generate(invariant, [batched, *others()], chunk=64, page_seed=5)
    single_tokens = request()
    generate(invariant, [single_tokens, *others()], chunk=1, page_seed=6)
    owner, cached = request(slot=2), request(slot=1, arrival=5)
    cached.prefix_of = owner
    generate(invariant, [owner, cached, others()[0]], chunk=48, page_seed=7)
    num_shared = 156 // PAGE_SIZE
    assert cached.pages[:num_shared] == owner.pages[:num_shared]
    for variant in (chunked, batched, single_tokens, owner, cached):
        assert variant.tokens == alone.tokens
        assert torch.equal(torch.stack(variant.logits), torch.stack(alone.logits))


def test_what_nobody_reads_changes_no_bit(
    invariant: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draws() -> list[torch.Tensor]:
        requests = others()
        generate(invariant, requests, chunk=64)
        return [torch.stack(request.logits) for request in requests]

    counts: list[int] = []
    run_model, builder = invariant.run_model, invariant._builder
    build = builder.build

    def counted(batch: Batch) -> torch.Tensor:
        hidden = run_model(batch)
        counts.append(len(hidden))
        return hidden

    monkeypatch.setattr(invariant, "run_model", counted)
    found, num_found = draws(), sum(counts)
    assert num_found == 4 * 9, "one for each sample"
    monkeypatch.setattr(builder, "build", lambda plan: replace(build(plan), logits_indices=None))
    counts.clear()
    for one, other in zip(found, draws(), strict=True):
        assert torch.equal(one, other)
    assert sum(counts) == 4 * 8 + 5 + 120 + 41 + 300, "all that was computed"


def test_seeded_draws_survive_batching(folder: str) -> None:
    runner = make_runner(folder)
    alone = Request(prompt=prompt(20), temperature=1.0, seed=-5, new_tokens=12)
    generate(runner, [alone])
    batched = Request(prompt=prompt(20), temperature=1.0, seed=-5, new_tokens=12, slot=3)
    other_seed = Request(prompt=prompt(20), temperature=1.0, seed=6, new_tokens=12, slot=5)
    generate(runner, [*others(), batched, other_seed], page_seed=3)
    assert batched.tokens == alone.tokens
    assert other_seed.tokens != alone.tokens


def test_plan_without_rows(folder: str) -> None:
    runner = make_runner(folder)
    result = runner.execute(Plan(1, [], [], []))
    assert (result.seq, result.token_ids) == (1, [])


def test_hello_counts_the_dummy_page(folder: str) -> None:
    hello = make_runner(folder, kv_cache_tokens=20 * PAGE_SIZE - 3).hello()
    assert (hello.rank, hello.num_pages) == (0, 21)
    assert (hello.max_model_len, hello.vocab_size) == (1024, VOCAB_SIZE)


def test_cache_sized_from_memory_is_no_larger_than_useful(folder: str) -> None:
    runner = make_runner(folder, kv_cache_tokens=None, max_model_len=100, max_num_seqs=3)
    assert runner.hello().num_pages <= 3 * -(-100 // PAGE_SIZE) + 1


def test_too_long_a_maximum_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match=r"--max-model-len 2000 exceeds .* 1024"):
        make_runner(folder, max_model_len=2000)


def test_bfloat16(folder: str) -> None:
    native, plain = (
        Request(prompt=prompt(20), new_tokens=1),
        Request(prompt=prompt(20), new_tokens=1),
    )
    generate(make_runner(folder, dtype="bfloat16", cpu_backend="native"), [native])
    generate(make_runner(folder, dtype="bfloat16", cpu_backend="torch"), [plain])
    assert native.logits[0].dtype == plain.logits[0].dtype == torch.float32
    error = (native.logits[0] - plain.logits[0]).abs().max()
    assert error < 0.05 * plain.logits[0].abs().max()


def test_a_named_attention_backend_attends_on_cpu_too(folder: str) -> None:
    """The compiled library has its own attention, so the name would be ignored."""
    assert make_runner(folder).model.native is not None
    assert make_runner(folder, attention_backend="torch").model.native is None
    with pytest.raises(ValueError, match="--attention-backend torch: remove one"):
        make_runner(folder, cpu_backend="native", attention_backend="torch")


def test_a_required_library_must_fit_the_model(folder: str) -> None:
    with pytest.raises(ValueError, match=r"--cpu-backend native .* page size \(8\)"):
        make_runner(folder, cpu_backend="native", page_size=8)


def test_the_largest_steps_are_measured_with_tables_of_processors(folder: str) -> None:
    """They are allocated for the first request that needs them, and kept."""
    runner = make_runner(folder, cpu_backend="torch")
    runner._profile()
    state = runner._tables.sampling
    assert state._masks._masks is not None
    assert state._edits._edits is not None
    assert state._penalties._counts is not None
