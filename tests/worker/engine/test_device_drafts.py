"""Speculative rows placed by the device: steps as on CUDA, with every op's torch reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.support.engines.device_lengths import ByDeviceLengths
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.engines.speculation_cases import MODEL, RandomGate, prompts
from worker.config import SchedulingConfig
from worker.protocol.sampling import SamplingParams
from worker.rank.speculation import factory
from worker.rank.speculation.drafter import Drafter
from worker.rank.verification import Acceptance, DeviceRows

NUM_PROMPTS = 12


class Watch:
    """Counts waits of the host, and rows placed by the device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.placed_on_host = self.placed_on_device = self.accepted = 0
        place, accept = Drafter._place_on_host, DeviceRows.accept

        def placing(drafter: Drafter, plan: Any) -> Any:
            self.placed_on_host += 1
            return place(drafter, plan)

        def accepting(rows: DeviceRows, tokens: torch.Tensor) -> Acceptance:
            acceptance = accept(rows, tokens)
            assert isinstance(acceptance.counts, torch.Tensor)
            self.placed_on_device += 1
            self.accepted += int((acceptance.counts - 1).clamp(min=0).sum())
            return acceptance

        patch.setattr(Drafter, "_place_on_host", placing)
        patch.setattr(DeviceRows, "accept", accepting)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    torch.set_num_threads(1)
    monkeypatch.setattr(factory, "drafts_on_device", lambda *_: True)
    return Watch(monkeypatch)


def settings(**rules: Any) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=(0.0, 0.7, 1.3)[i % 3],
            top_p=0.9,
            seed=i,
            max_tokens=24 + i % 5,
            ignore_eos=i % 2 == 0,
            **rules,
        )
        for i in range(NUM_PROMPTS)
    ]


def run(
    sampling: Sequence[SamplingParams], *, at_random: bool = False, **options: Any
) -> list[Outcome]:
    fixed = {"cpu_backend": "torch", "max_model_len": 512, "kv_cache_tokens": 8192}
    with Engine(MODEL, **{**fixed, **options}) as engine:
        engine.runner._attention = ByDeviceLengths()
        gate = engine.core.scheduler.steps.speculation
        if at_random:
            assert gate is not None
            engine.core.scheduler.steps.speculation = RandomGate(
                *(gate.config, SchedulingConfig()), stops_itself=gate.stops_itself
            )
        return engine.outcomes(prompts(NUM_PROMPTS), sampling)


NGRAM: dict[str, Any] = {"speculative_method": "ngram", "speculative_adaptive": False}


@pytest.fixture(scope="module")
def plain() -> list[Outcome]:
    """Outcomes without drafts."""
    torch.set_num_threads(1)
    return run(settings())


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_depth": 0},
        pytest.param({"overlap_depth": 1, "num_speculative_tokens": 4}, marks=pytest.mark.long),
        pytest.param({"overlap_depth": 1, "at_random": True}, marks=pytest.mark.long),
        {"overlap_depth": 1, "at_random": True, "kv_cache_tokens": 512},
        {"overlap_depth": 1, "max_num_batched_tokens": 48, "num_speculative_tokens": 20},
    ],
    ids=str,
)
def test_tokens_are_those_of_plain_decoding_and_nobody_waits(
    plain: list[Outcome], watch: Watch, options: dict[str, Any]
) -> None:
    outcomes = run(settings(), **{**NGRAM, **options})
    assert outcomes == plain
    assert watch.placed_on_device > 5
    assert watch.accepted > 5
    assert watch.placed_on_host == 0


def test_rows_with_logits_processors_are_placed_on_the_host(watch: Watch) -> None:
    sampling = settings()
    sampling[1::4] = settings(frequency_penalty=0.4, logit_bias={40: 2.0}, logprobs=1)[1::4]
    expected = run(sampling)
    outcomes = run(sampling, **NGRAM, overlap_depth=1)
    # Log-probabilities are from other batches: their last bits differ.
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in expected]
    assert watch.placed_on_host > 0


def test_a_requests_end_cuts_what_its_row_computes(watch: Watch) -> None:
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in range(2, 14)
    ]
    expected = run(sampling)
    outcomes = run(sampling, **NGRAM, overlap_depth=1, num_speculative_tokens=16)
    assert outcomes == expected
    assert watch.placed_on_device > 0
