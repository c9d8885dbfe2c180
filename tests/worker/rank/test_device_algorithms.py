"""Rounds on the device decide what the algorithms on the host decide."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.protocol.diffusion import DllmAlgorithm
from worker.rank.diffusion.algorithms import ALGORITHMS
from worker.rank.diffusion.base import BlockBatch, BlockParams, Proposal
from worker.rank.diffusion.device_algorithms import (
    ON_DEVICE,
    DeviceProposal,
    columns_of,
    decide,
    params_on_device,
)

SIZE, MASK = 5, 9


def always(proposal: Proposal) -> Callable[[torch.Tensor], Proposal]:
    return lambda _: proposal


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(ON_DEVICE), min_size=1, max_size=6),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_decisions_are_those_of_the_host(
    names: list[DllmAlgorithm], seed: int, report_at_once: bool
) -> None:
    rng = np.random.default_rng(seed)
    shape = (len(names), SIZE)
    fixed = np.arange(SIZE) < rng.integers(0, SIZE, (len(names), 1))
    undecided = ~fixed & (rng.random(shape) < rng.choice([0.0, 0.5, 1.0], (len(names), 1)))
    ids = np.where(undecided, MASK, rng.integers(0, 3, shape)).astype(np.int32)
    tokens = rng.integers(0, 3, shape).astype(np.int32)
    # Equal confidences, and NaN where all tokens of a position are excluded.
    chances = (0.3, 0.3, 0.3, 0.1)
    confidence = rng.choice([0.2, 0.5, 0.9, np.nan], shape, p=chances).astype(np.float32)
    entropy = rng.choice([0.0, 0.3, 1.0, np.nan], shape, p=chances).astype(np.float32)
    column = (len(names), 1)
    params = BlockParams(
        threshold=rng.choice([0.1, 0.5, 0.95], column).astype(np.float32),
        steps=rng.integers(1, SIZE + 1, column).astype(np.int32),
        entropy_bound=rng.choice([0.0, 0.3, 1.5], column).astype(np.float32),
        edit_threshold=rng.choice([0.0, 0.5], column).astype(np.float32),
        max_post_edit_steps=rng.integers(0, 3, column).astype(np.int32),
        penalty=np.zeros(column, dtype=np.float32),
    )
    rounds = rng.integers(0, SIZE, len(names))
    states = np.stack((rng.integers(0, 3, len(names)), rng.integers(0, 2, len(names))), axis=1)
    states = np.where(np.array(names)[:, None] == "JointThreshold", states, 0)
    staged = {
        key: torch.from_numpy(values) for key, values in columns_of(names, params, SIZE).items()
    }
    found = decide(
        torch.from_numpy(ids),
        torch.from_numpy(undecided),
        torch.from_numpy(fixed),
        torch.from_numpy(rounds).unsqueeze(1),
        torch.from_numpy(states),
        DeviceProposal(*(torch.from_numpy(part) for part in (tokens, confidence, entropy))),
        params_on_device(names, staged),
        report_at_once=report_at_once,
    )
    for row, name in enumerate(names):
        own = slice(row, row + 1)
        state = states[own].astype(np.int32)
        batch = BlockBatch(
            ids=ids[own].copy(),
            undecided=undecided[own].copy(),
            fixed=fixed[own],
            scored=np.ones((1, SIZE), dtype=np.bool_),
            rounds=rounds[own],
            params=BlockParams(
                **{field: getattr(params, field)[own] for field in BlockParams.__slots__}
            ),
            report_at_once=report_at_once,
            propose=always(Proposal(tokens[own], confidence[own], entropy[own])),
            propose_edits=lambda _: pytest.fail("none of these algorithms moves tokens"),
            histories=[[]],
            special=None,
        )
        done = ALGORITHMS[name]().step(batch, torch.empty(0), state)
        assert found.done[row].item() == done[0], name
        assert found.ids[row].tolist() == batch.ids[0].tolist(), name
        assert found.undecided[row].tolist() == batch.undecided[0].tolist(), name
        assert found.states[row].tolist() == state[0].tolist(), name
