"""No sampling parameters of clients crash a rank: every sample is a valid token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints.dense import VOCAB_SIZE, write_checkpoint
from tests.support.effort import cases
from tests.support.engines.plan_driver import Request, generate, make_runner
from worker.core.scheduler.admission import _signed
from worker.plan.plan import Admit
from worker.protocol.sampling import SamplingParams
from worker.rank.sampler import sample_logits
from worker.rank.sampling.state import SamplingState

TEMPERATURES = (0.0, 5e-324, 1e-45, 1e-30, 9.9e-6, 1e-5, 1.1e-5, 1e-3, 1.0, 100.0)
TOP_PS = (5e-324, 1e-45, 1e-30, 1e-7, 0.5, 1.0 - 2**-24, 1.0 - 2**-53, 1.0)
TOP_KS = (-1, 0, 1, 2, 500, 2**31 - 1)
MIN_PS = (0.0, 5e-324, 1e-30, 0.5, 1.0 - 2**-53, 1.0)
SEEDS = (0, 1, -1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
SCALES = (0.0, 1e-38, 1.0, 80.0, 1e30)

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from(TEMPERATURES) | st.floats(0, 100),
    top_p=st.sampled_from(TOP_PS),
    top_k=st.sampled_from(TOP_KS),
    min_p=st.sampled_from(MIN_PS),
    seed=st.sampled_from(SEEDS),
)


def make_state(num_rows: int) -> SamplingState:
    return SamplingState(
        num_rows=num_rows, token_stride=99, vocab_size=97, device=torch.device("cpu")
    )


@settings(max_examples=cases(150), deadline=None)
@given(
    rows=st.lists(params, min_size=1, max_size=5),
    scale=st.sampled_from(SCALES),
    vocab_size=st.sampled_from([1, 2, 97, 600]),
    broken=st.sampled_from([None, float("inf"), float("-inf"), float("nan")]),
)
def test_every_draw_is_a_token(
    rows: list[SamplingParams], scale: float, vocab_size: int, broken: float | None
) -> None:
    state = make_state(len(rows))
    for slot, row in enumerate(rows):
        top_k, seed = max(row.top_k, 0), _signed(row.seed)
        state.admit(Admit(slot, b"", row.temperature, top_k, row.top_p, row.min_p, seed))
    slots = np.arange(len(rows))
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(1)) * scale
    if broken is not None:  # a checkpoint that overflows
        logits[:, 0] = broken
    tokens = sample_logits(logits, state.parameters(slots, slots + 2**20)).tolist()
    assert all(0 <= token < vocab_size for token in tokens)


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 9.9e-6, 1e-5])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    state = make_state(1)
    state.admit(Admit(0, b"", temperature, 0, 1.0, 0.0, 3))
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(2))
    slots = np.zeros(1, dtype=np.int64)
    token = sample_logits(logits, state.parameters(slots, slots))
    assert token.tolist() == [int(logits.argmax())]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(1, 1.0, 0.0), (0, 1e-30, 0.0), (0, 1.0, 1.0)]
)
def test_filters_that_leave_one_token_leave_the_likeliest(
    top_k: int, top_p: float, min_p: float
) -> None:
    state = make_state(1)
    state.admit(Admit(0, b"", 100.0, top_k, top_p, min_p, 3))
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(2))
    slots = np.zeros(1, dtype=np.int64)
    token = sample_logits(logits, state.parameters(slots, slots))
    assert token.tolist() == [int(logits.argmax())]


def test_a_runner_survives_the_extremes_together(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_checkpoint("qwen3", tmp_path)
    runner = make_runner(str(tmp_path), max_model_len=64)
    requests = [
        Request(prompt=[0], slot=0, temperature=1e-30, top_k=2**31 - 1, seed=-(2**63)),
        Request(prompt=[VOCAB_SIZE - 1], slot=1, temperature=100.0, top_p=1e-45, seed=2**63 - 1),
        Request(prompt=[1] * 63, slot=2, temperature=1.0, min_p=1.0, new_tokens=1),
        Request(prompt=[2] * 60, slot=3, temperature=1e-5, top_k=1, top_p=1e-7, min_p=1e-30),
    ]
    generate(runner, requests)
    assert all(0 <= token < VOCAB_SIZE for request in requests for token in request.tokens)
