"""Masks against a naive reference, samples against their distribution, and independence of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kernels import SamplingParameters
from kernels.sample_tokens.reference import masked_logits
from worker.plan.plan import Admit
from worker.rank.sampler import sample_logits
from worker.rank.sampling.logprobs import score
from worker.rank.sampling.state import SamplingState

CPU = torch.device("cpu")
VOCAB = 97
CASES = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.5, 20, 0.8, 0.05),
    (2.0, 1, 1.0, 0.0),
    (1.0, 500, 0.999, 0.0),
    (1.0, 3, 0.01, 0.9),
]


def make_state(cases: Sequence[tuple[float, int, float, float]], seed: int = 0) -> SamplingState:
    state = SamplingState(num_rows=len(cases), token_stride=99, vocab_size=VOCAB, device=CPU)
    for slot, (temperature, top_k, top_p, min_p) in enumerate(cases):
        state.admit(Admit(slot, b"", temperature, top_k, top_p, min_p, seed + slot))
    return state


def parameters(
    cases: Sequence[tuple[float, int, float, float]], seed: int = 0
) -> SamplingParameters:
    slots = np.arange(len(cases))
    found = make_state(cases, seed).parameters(slots, slots + 10)
    assert found is not None
    return found


def naive_mask(logits: torch.Tensor, case: tuple[float, int, float, float]) -> torch.Tensor:
    """Kept tokens of one row, token by token."""
    temperature, top_k, top_p, min_p = case
    scaled = logits / temperature
    kept = [True] * len(scaled)
    probabilities = scaled.softmax(-1)
    for token in range(len(scaled)):
        kept[token] = bool(probabilities[token] >= min_p * probabilities.max())
    order = sorted(range(len(scaled)), key=lambda token: -float(scaled[token]))
    survivors = [token for token in order if kept[token]]
    if top_k:
        survivors = survivors[:top_k]
    mass = scaled[survivors].double().softmax(-1)
    nucleus, total = [], 0.0
    for token, probability in zip(survivors, mass.tolist(), strict=True):
        nucleus.append(token)
        total += probability
        if total >= top_p:
            break
    mask = torch.zeros(len(scaled), dtype=torch.bool)
    mask[nucleus] = True
    return mask


def test_masks_equal_a_naive_reference() -> None:
    logits = torch.randn(len(CASES), VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    masked = masked_logits(logits, parameters(CASES))
    for row, case in enumerate(CASES):
        kept = masked[row] > float("-inf")
        assert torch.equal(kept, naive_mask(logits[row], case)), case
        assert torch.equal(masked[row][kept], (logits[row] / case[0])[kept])


def test_flat_nucleus_of_a_large_vocabulary() -> None:
    """Some rows keep more tokens than the first search covers."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 1200, generator=generator) * torch.tensor([[0.1], [5.0], [0.1]])
    cases = [(1.0, 0, 0.9, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.0)]
    masked = masked_logits(logits, parameters(cases))
    for row, case in enumerate(cases):
        assert torch.equal(masked[row] > float("-inf"), naive_mask(logits[row], case))
    assert (masked[0] > float("-inf")).sum() > 256


def test_rows_do_not_depend_on_each_other() -> None:
    logits = torch.randn(len(CASES), VOCAB, generator=torch.Generator().manual_seed(2))
    together = masked_logits(logits, parameters(CASES))
    for row, case in enumerate(CASES):
        alone = masked_logits(logits[row : row + 1], parameters([case]))
        assert torch.equal(alone[0], together[row])


def test_top_p_elsewhere_keeps_improbable_tokens() -> None:
    logits = torch.tensor([[0.0, -200.0, 1.0], [0.0, 1.0, 2.0]])
    masked = masked_logits(logits, parameters([(1.0, 0, 1.0, 0.0), (1.0, 0, 0.5, 0.0)]))
    assert torch.equal(masked[0], logits[0])


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]])
def test_draws_follow_the_distribution(case: tuple[float, int, float, float]) -> None:
    draws = 8000
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    rows = parameters([case] * draws, seed=1000)
    tokens = sample_logits(logits.expand(draws, VOCAB), rows)
    expected = masked_logits(logits.unsqueeze(0), parameters([case]))[0].softmax(-1) * draws
    counts = torch.bincount(tokens, minlength=VOCAB)
    assert (counts[expected == 0] == 0).all()
    often = expected >= 5
    statistic = ((counts[often] - expected[often]) ** 2 / expected[often]).sum()
    freedom = int(often.sum())
    # Mean of the chi-square distribution plus four standard deviations.
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_greedy_and_random_rows_share_a_batch() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4))
    filters = (3, 0.5, 0.0)
    state = make_state([(0.0, *filters), (1.0, *filters), (0.0, 0, 1.0, 0.9), (1.0, 0, 1.0, 0.0)])
    slots = np.arange(4)
    tokens = sample_logits(logits, state.parameters(slots, slots))
    greedy = logits.argmax(-1)
    assert tokens[[0, 2]].tolist() == greedy[[0, 2]].tolist()
    for row in range(4):
        one = state.parameters(slots[row : row + 1], slots[row : row + 1])
        assert (one is None) == (row in (0, 2))
        assert int(sample_logits(logits[row : row + 1], one)) == int(tokens[row])


def test_greedy_rows_filter_nothing() -> None:
    state = make_state([(0.0, 3, 0.5, 0.1), (0.7, 0, 1.0, 0.0), (0.7, 9, 0.9, 0.1)])
    assert state.filters(np.array([0, 1])) == ()
    assert state.filters(np.array([0, 2])) == ("top_k", "top_p", "log_min_p")


def test_all_greedy_needs_no_parameters() -> None:
    state = make_state([(0.0, 0, 1.0, 0.0)] * 2)
    assert state.parameters(np.arange(2), np.arange(2)) is None
    assert sample_logits(torch.tensor([[0.0, 2.0], [3.0, 1.0]]), None).tolist() == [1, 0]


def test_seed_and_position_decide_the_draw() -> None:
    state = make_state([(1.0, 0, 1.0, 0.0)] * 2)
    state.seeds[:] = 42
    logits = torch.zeros(2, VOCAB)
    same = state.parameters(np.array([0, 1]), np.array([9, 9]))
    other = state.parameters(np.array([0, 1]), np.array([9, 10]))
    first, second = sample_logits(logits, same).tolist()
    assert first == second
    assert len(set(sample_logits(logits, other).tolist())) == 2
    further = state.parameters(np.array([0, 1]), np.array([9, 9]), keys=np.array([0, 2**63 - 1]))
    assert len(set(sample_logits(logits, further).tolist())) == 2


def test_log_probabilities_are_of_the_softmax_and_equals_come_by_token() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 200, generator=generator)
    logits = (logits * 4).round() / 4  # many are equal
    tokens = torch.randint(0, 200, (40,), generator=generator)
    num_top = [row % 21 for row in range(40)]
    expected = logits.double().log_softmax(dim=-1)
    for row, one in enumerate(score(logits, tokens, num_top).to_host()):
        own, *top = one.token_ids
        assert own == tokens[row]
        kept = logits[row].sort(descending=True).values[: num_top[row]]
        assert logits[row, top].tolist() == kept.tolist()
        pairs = list(zip(kept.tolist(), top, strict=True))
        assert pairs == sorted(pairs, key=lambda pair: (-pair[0], pair[1]))
        assert one.logprobs == pytest.approx(expected[row, [own, *top]].tolist(), abs=1e-5)
        assert one.rank == int((logits[row] >= logits[row, own]).sum())
