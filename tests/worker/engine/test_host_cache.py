"""Data loaded from host memory equals what was offloaded; preempted requests get all of it back."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.checkpoints.dense import VOCAB_SIZE
from tests.support.checkpoints.sdar import write_sdar
from tests.support.engines.engine_driver import Engine
from tests.support.engines.poisoned_engine import PoisonedEngine
from tests.support.engines.preempted_requests import CACHE_TOKENS, run, submits
from worker.config import EngineConfig
from worker.protocol.host_cache import HostCacheTotals
from worker.protocol.messages import Submit
from worker.protocol.sampling import SamplingParams


class HostEngine(PoisonedEngine):
    """Engine whose steps run late, and which overwrites free memory, also on the host."""

    def __init__(self, model: str, **options: object) -> None:
        defaults: dict[str, object] = {
            "batch_invariant": True,
            "host_cache_gib": 0.01,
            "host_cache_policy": "always",
        }
        super().__init__(model, **{**defaults, **options})

    def after_step(self) -> None:
        super().after_step()
        cache, host = self.core.scheduler.state.cache, self.runner._host_pages
        assert cache.host is not None
        assert host is not None
        # Otherwise, the step in flight still reads slots that are free from then on.
        if not host._unawaited:
            host.slots.index_fill_(0, torch.tensor(cache.host._slots.free), float("nan"))

    @property
    def totals(self) -> HostCacheTotals:
        found = self.core.scheduler.take_report().load.host_cache
        assert found is not None
        gone = found.num_loaded + found.num_evicted + found.num_recomputed
        assert found.num_used == found.num_stored - gone
        return found


@pytest.fixture(scope="module")
def block_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return write_sdar(tmp_path_factory.mktemp("sdar"), 4, vocab_size=VOCAB_SIZE).folder


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def submit(name: str, prompt: list[int], priority: int, max_tokens: int) -> Submit:
    return Submit(
        request_id=name,
        gateway_id="g",
        prompt=torch.tensor(prompt, dtype=torch.int32).numpy().tobytes(),
        sampling=SamplingParams(temperature=1.0, seed=1, max_tokens=max_tokens, ignore_eos=True),
        priority=priority,
    )


def test_requests_preempted_at_any_time_yield_the_same_and_re_read_their_cache(
    folder: str,
) -> None:
    rng = random.Random(1)
    requests = submits(rng)[:32]
    needed = sum(len(r.prompt) // 4 + (r.sampling.max_tokens or 0) for r in requests)
    assert needed >= 10 * CACHE_TOKENS
    with Engine(
        folder, batch_invariant=True, kv_cache_tokens=16384, preempt_priority_gap=0
    ) as engine:
        undisturbed = run(engine, {0: requests})
    arrivals: dict[int, list[Submit]] = {}
    for one in requests:
        arrivals.setdefault(rng.randrange(200 if one.priority == 9 else 30), []).append(one)
    with HostEngine(
        folder,
        kv_cache_tokens=CACHE_TOKENS,
        page_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=64,
    ) as engine:
        disturbed = run(engine, arrivals)
        assert engine.num_preemptions >= 5, "hardly anybody was preempted"
        totals = engine.totals
    assert disturbed == undisturbed
    # The rest is the incomplete last page.
    by_copy = totals.num_resumed_loaded_tokens
    assert by_copy >= 0.9 * (totals.num_resumed_tokens - totals.num_resumed_cached_tokens)
    assert by_copy > 100
    assert not totals.num_recomputed


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_whose_pages_all_went_re_reads_them_by_copy(folder: str, depth: int) -> None:
    rng = random.Random(3)
    victim = submit("victim", random_prompt(rng, 300), 0, 80)
    urgent = [submit(f"u{i}", random_prompt(rng, 150), 9, 12) for i in range(4)]
    with Engine(folder, batch_invariant=True, kv_cache_tokens=4096) as engine:
        alone = run(engine, {0: [victim, *urgent]})
    with HostEngine(
        folder,
        kv_cache_tokens=448,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        overlap_depth=depth,
    ) as engine:
        assert run(engine, {0: [victim], 25: urgent}) == alone
        assert engine.num_preemptions == 1
        totals = engine.totals
    assert totals.num_resumed_tokens > 300
    assert totals.num_resumed_loaded_tokens >= 0.9 * totals.num_resumed_tokens


@pytest.mark.parametrize("kind", ["plain", "parallel", "drafting", "blocks"])
def test_a_prefix_that_went_to_the_host_is_a_hit(folder: str, block_folder: str, kind: str) -> None:
    rng = random.Random(5)
    options: dict[str, object] = {"kv_cache_tokens": 192, "max_num_seqs": 2}
    if kind == "parallel":
        options |= {"tensor_parallel_size": 2}
    elif kind == "drafting":
        options |= {"speculative_method": "draft", "speculative_model": folder}
        options |= {"speculative_adaptive": False, "speculative_max_utilization": 2.0}
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [random_prompt(rng, 100) for _ in range(3)]
    with HostEngine(block_folder if kind == "blocks" else folder, **options) as engine:
        first = engine.generate([prompts[0]], sampling)
        others = engine.generate(prompts[1:], sampling)
        loaded_before = engine.totals.num_loaded
        assert engine.generate([prompts[0]], sampling) == first
        loaded = engine.totals.num_loaded - loaded_before
        assert loaded == 6, "all pages of the prompt"
        assert engine.generate(prompts[1:], sampling) == others
        assert engine.totals.num_loaded > loaded_before + loaded


def test_what_cannot_be_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="--host-cache-gib must not be negative"):
        EngineConfig.of(model=folder, host_cache_gib=-1.0)
    with pytest.raises(ValueError, match="--host-cache-gib needs prefix caching"):
        EngineConfig.of(model=folder, host_cache_gib=1.0, enable_prefix_caching=False)
    with pytest.raises(ValueError, match="smaller than one page"):
        HostEngine(folder, host_cache_gib=1e-6)
    with pytest.raises(ValueError, match="exceeds this machine"):
        HostEngine(folder, host_cache_gib=1e6)
