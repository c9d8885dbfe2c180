"""Sampling kernels against their torch references; run by the interpreter and on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from kernels import (
    EditRows,
    PenaltyRows,
    SamplingParameters,
    StepRows,
    TokenCells,
    TokenEdits,
    apply_penalties_,
    apply_token_bitmask,
    apply_token_edits_,
    count_tokens_,
    gather_step_inputs,
    registry,
    sample_tokens,
    token_scores,
    write_table_rows_,
)
from kernels.sample_tokens.reference import masked_logits

FILTERS = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.5, 20, 0.8, 0.05),
    (2.0, 1, 1.0, 0.0),
    (1.0, 5000, 0.999, 0.0),
    (1.0, 3, 0.01, 0.9),
    (0.0, 3, 0.5, 0.5),
    (1e-5, 0, 0.9, 0.0),
    (100.0, 2**31 - 1, 1.0 - 2**-24, 1e-30),
    (1.0, 40, 1e-30, 0.0),
]


def parameters(
    cases: list[tuple[float, int, float, float]], device: str, seed: int = 0
) -> SamplingParameters:
    temperature, top_k, top_p, min_p = zip(*cases, strict=True)
    rows = torch.arange(len(cases))
    return SamplingParameters(
        temperature=torch.tensor(temperature, dtype=torch.float32).to(device),
        seeds=((rows + seed) * 2**33 - 7).to(device),
        positions=(rows + 10).to(device),
        top_k=torch.tensor(top_k).to(device),
        top_p=torch.tensor(top_p, dtype=torch.float32).to(device),
        log_min_p=torch.tensor(min_p, dtype=torch.float32).log().to(device),
    )


def part_of(whole: SamplingParameters, rows: slice) -> SamplingParameters:
    found = {f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}
    return SamplingParameters(**{n: v[rows] for n, v in found.items() if v is not None})


def make_logits(rows: int, vocab: int, scale: float, device: str, *, ties: bool) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    if ties:
        logits = (logits * 8).round() / 8
        logits[:, 5:9] = torch.tensor([0.0, -0.0, float("-inf"), 1e-40])
    return logits.to(device)


def sample_case(device: str, dtype: torch.dtype) -> None:
    """Checks that kept tokens equal the reference's, and samples as well, since there are no near
    ties."""
    from kernels.sample_tokens.triton_threshold import find_thresholds

    for cases, vocab, scale, ties in (
        (FILTERS, 97, 3.0, True),
        (FILTERS[3:8], 5003, 3.0, False),
        (FILTERS[5:8], 9000, 0.01, True),
    ):
        own = parameters(cases, device)
        logits = make_logits(len(cases), vocab, scale, device, ties=ties)
        is_greedy = own.temperature < 1e-5
        masked = masked_logits(logits, own)
        scaled = logits / own.temperature.masked_fill(is_greedy, 1.0).unsqueeze(1)
        kept = scaled >= find_thresholds(logits, own).values.unsqueeze(1)
        expected = masked > float("-inf")
        differ = (kept & (scaled > float("-inf"))) != expected
        assert not differ[~is_greedy].any(), (vocab, differ.any(dim=1).nonzero())
        with registry.using("torch"):
            reference = sample_tokens(logits, own)
        with registry.using("triton"):
            drawn = torch.empty_like(reference)
            pool = torch.full((99,), -1, dtype=torch.int32, device=device)
            cells = 98 - 3 * torch.arange(len(cases), device=device)
            # Without either: the cases below.
            assert sample_tokens(logits, own, drawn, TokenCells(pool, cells)) is drawn
        assert torch.equal(drawn, reference), (vocab, drawn, reference)
        assert torch.equal(pool[cells], reference.int())
        assert int((pool >= 0).sum()) == len(cases)


def narrow_case(device: str, dtype: torch.dtype) -> None:
    """Checks rows with few tokens to keep, which use no histogram, and flat rows and rows with many
    tokens, which do."""
    from kernels.sample_tokens.triton_narrow import filters_of, narrow

    few = [(1.0, 20, 1.0, 0.0), (0.6, 20, 0.95, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.05)]
    few += [(0.7, 0, 0.8, 0.1), (1.0, 100, 0.999, 0.0), (0.0, 5, 0.5, 0.5)]
    many = [(1.0, 4500, 1.0, 0.0), (3.0, 0, 0.95, 0.0), (3.0, 0, 0.95, 1e-6)]
    logits = make_logits(len(few + many), 35_000, 5.0, device, ties=False)
    own = parameters(few + many, device)
    with registry.using("triton"):
        is_open = narrow(logits, own, filters_of(own)).is_open
    assert is_open.tolist() == [0] * len(few) + [1] * len(many)


def sample_without_filters_case(device: str, dtype: torch.dtype) -> None:
    for vocab in (1, 33, 5003):
        logits = make_logits(6, vocab, 2.0, device, ties=False)
        whole = parameters([(t, 0, 1.0, 0.0) for t in (0.0, 1.0, 0.0, 2.0, 0.1, 1.0)], device)
        for names in ((), ("top_k",), ("top_p",), ("log_min_p",), ("top_k", "log_min_p")):
            absent: dict[str, Any] = {
                n: None for n in ("top_k", "top_p", "log_min_p") if n not in names
            }
            own = dataclasses.replace(whole, **absent)
            with registry.using("torch"):
                reference = sample_tokens(logits, own)
            with registry.using("triton"):
                assert torch.equal(sample_tokens(logits, own), reference)


def sample_invariance_case(device: str, dtype: torch.dtype) -> None:
    """Checks that a row's threshold and sample do not depend on other rows or its position."""
    from kernels.sample_tokens.triton_threshold import find_thresholds

    logits = make_logits(len(FILTERS), 4100, 2.0, device, ties=False)
    whole = parameters(FILTERS, device)
    with registry.using("triton"):
        drawn, thresholds = sample_tokens(logits, whole), find_thresholds(logits, whole).values
        for rows in (slice(0, 1), slice(3, 9), slice(12, 13)):
            own = part_of(whole, rows)
            assert torch.equal(sample_tokens(logits[rows], own), drawn[rows])
            assert torch.equal(find_thresholds(logits[rows], own).values, thresholds[rows])


def sample_extremes_case(device: str, dtype: torch.dtype) -> None:
    """Checks that a sample is a valid token for any logits of a broken checkpoint."""
    broken = (float("inf"), float("-inf"), float("nan"))
    for value, whole in itertools.product(broken, (False, True)):
        logits = make_logits(4, 600, 1e30, device, ties=False)
        logits[0] = 0.0
        logits[:, : 600 if whole else 1] = value
        with registry.using("triton"):
            drawn = sample_tokens(logits, parameters(FILTERS[4:8], device))
        assert bool(((drawn >= 0) & (drawn < 600)).all())


def bitmask_case(device: str, dtype: torch.dtype) -> None:
    for vocab in (31, 64, 4500):
        words = -(-vocab // 32)
        mask = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int32).to(device)
        mask[1] = -1
        rows, mask_rows = torch.tensor([4, 0, 2]).to(device), torch.tensor([1, 2, 2]).to(device)
        whole = mask.repeat(2, 1)[:5]
        for own, chosen in (
            (whole, {}),
            (mask, {"rows": rows}),
            (mask, {"rows": rows, "mask_rows": mask_rows}),
            (mask, {"mask_rows": torch.tensor([2, 1, 1, 0, 2]).to(device)}),
        ):
            found = []
            for backend in ("torch", "triton"):
                logits = make_logits(5, vocab, 1.0, device, ties=False).to(dtype)
                with registry.using(backend):
                    apply_token_bitmask(logits, own, **chosen)
                found.append(logits)
            assert torch.equal(*found)
            assert bool((found[0] == float("-inf")).any())


def penalties_case(device: str, dtype: torch.dtype) -> None:
    vocab, slots = 4500, 5
    pool = torch.randint(0, vocab, (slots, 40), dtype=torch.int32)
    pool[:, 3:9] = 7  # a token that occurs several times
    ends, prompts = [30, 12, 40], [10, 12, 0]
    in_prompt, counts = torch.zeros(slots, vocab, dtype=torch.bool), torch.zeros(slots, vocab)
    for slot, end, num_prompt in zip((3, 0, 1), ends, prompts, strict=True):
        in_prompt[slot, pool[slot, :num_prompt].long()] = True
        counts[slot] = torch.bincount(pool[slot, num_prompt:end], minlength=vocab).float()
    rows = PenaltyRows(
        rows=torch.tensor([2, 0, 3]).to(device),
        slots=torch.tensor([3, 0, 1]).to(device),
        ends=torch.tensor(ends).to(device),
        num_drafts=torch.zeros(3, dtype=torch.long).to(device),
        most_drafts=0,
        frequency=torch.tensor([0.5, 0.0, -1.0]).to(device),
        presence=torch.tensor([0.25, 0.0, 2.0]).to(device),
        repetition=torch.tensor([1.5, 1.2, 1.0]).to(device),
    )
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for backend in ("torch", "triton"):
        logits = make_logits(4, vocab, 2.0, device, ties=False)
        own = counts.int().to(device)
        with registry.using(backend):
            apply_penalties_(logits, rows, in_prompt.to(device), own, pool.to(device))
            count_tokens_(own, rows, torch.tensor([9, 9, 11, 12]).to(device))
        found.append((logits, own))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=1e-6)
    assert torch.equal(found[1][1], found[0][1])
    untouched = make_logits(4, vocab, 2.0, device, ties=False)
    assert torch.equal(found[1][0][1], untouched[1])
    assert not torch.equal(found[1][0][2], untouched[2])


def penalties_of_drafts_case(device: str, dtype: torch.dtype) -> None:
    """Checks that drafts that are not counted yet are penalized as if they were."""
    vocab, prompt, end, most = 300, 4, 12, 3
    pool = torch.randint(0, 9, (2, 16), dtype=torch.int32)
    in_prompt = torch.zeros(2, vocab, dtype=torch.bool)
    in_prompt[1, pool[1, :prompt].long()] = True

    def penalised(logits: torch.Tensor, ends: list[int], num_drafts: list[int]) -> torch.Tensor:
        counts = torch.zeros(2, vocab, dtype=torch.int32)
        counts[1] = torch.bincount(pool[1, prompt : ends[0]], minlength=vocab)
        ones = torch.ones(len(ends), device=device)
        rows = PenaltyRows(
            rows=torch.arange(len(ends), device=device),
            slots=torch.ones(len(ends), dtype=torch.long, device=device),
            ends=torch.tensor(ends, device=device),
            num_drafts=torch.tensor(num_drafts, device=device),
            most_drafts=max(num_drafts),
            frequency=0.5 * ones,
            presence=0.25 * ones,
            repetition=1.5 * ones,
        )
        own = logits.clone()
        apply_penalties_(own, rows, in_prompt.to(device), counts.to(device), pool.to(device))
        return own

    for backend in ("torch", "triton"):
        logits = make_logits(most + 1, vocab, 2.0, device, ties=False)
        with registry.using(backend):
            numbers = list(range(most + 1))
            together = penalised(logits, [end + number for number in numbers], numbers)
            for number in numbers:
                alone = penalised(logits[number : number + 1], [end + number], [0])
                assert torch.equal(together[number], alone[0])


def token_edits_case(device: str, dtype: torch.dtype) -> None:
    """Checks biases over several blocks, and words shorter and longer than a block."""
    vocab, length = 400, 700
    pool = torch.randint(0, 9, (3, length), dtype=torch.int32)
    pool[1, -1] = pool[2, -1] = 0
    biased = torch.randperm(vocab)[:200]
    num_output = 690
    before = pool[1, :-1].tolist()  # the newest token is to be sampled at length - 1
    words = [
        [*before[-2:], 11],
        [*before[-3:], 12],
        [*before[-300:], 13],
        [*before[-num_output:], 14],
        [*before[-num_output - 1 :], 15],  # reaches into the prompt
        [*before[-300:-298], 9, *before[-297:], 16],  # differs in one place
        [8, *before[-256:], 17],
        [9, 18],
        [before[-1], int(biased[0])],
    ]
    tokens = [token for word in words for token in word]
    ends = torch.tensor([len(word) for word in words]).cumsum(0)
    edits = TokenEdits(
        bias_tokens=biased.int().repeat(3, 1).to(device),
        biases=torch.full((3, 200), 1.5).to(device),
        words=torch.tensor(tokens).int().repeat(3, 1).to(device),
        word_ends=ends.int().repeat(3, 1).to(device),
    )
    for num_biases, num_words in ((200, len(words)), (129, 0), (0, len(words)), (1, 3)):
        rows = EditRows(
            rows=torch.tensor([2, 0, 1]).to(device),
            slots=torch.tensor([1, 2, 0]).to(device),
            cells=torch.tensor([2 * length - 1, 3 * length - 1, 5]).to(device),
            num_output=torch.tensor([num_output, 5, 5]).to(device),
            num_biases=torch.tensor([num_biases, 2, 0]).to(device),
            num_words=torch.tensor([num_words, 0, 0]).to(device),
            most_biases=max(num_biases, 2),
            most_words=num_words,
        )
        found = []
        for backend in ("torch", "triton"):
            logits = make_logits(3, vocab, 1.0, device, ties=False)
            with registry.using(backend):
                apply_token_edits_(logits, edits, rows, pool.to(device))
            found.append(logits)
        assert torch.equal(*found), (num_biases, num_words)
        expected = make_logits(3, vocab, 1.0, device, ties=False)
        assert torch.equal(found[0][1], expected[1]), "a row without edits"
        expected[2, biased[:num_biases].to(device)] += 1.5
        expected[0, biased[:2].to(device)] += 1.5
        banned = [word[-1] for word in words[:num_words] if word[:-1] == before[1 - len(word) :]]
        banned = [token for token in banned if token != 15]
        assert num_words < 9 or len(banned) in (5, 6)
        expected[2, banned] = float("-inf")
        assert torch.equal(found[0], expected), (num_biases, num_words)


def token_scores_case(device: str, dtype: torch.dtype) -> None:
    for vocab, scale in ((1, 1.0), (97, 3.0), (9000, 2.0)):
        logits = make_logits(7, vocab, scale, device, ties=vocab == 97)
        tokens = torch.randint(0, vocab, (7,)).to(device)
        with registry.using("torch"):
            expected = token_scores(logits, tokens)
        with registry.using("triton"):
            actual = token_scores(logits, tokens)
            part = token_scores(logits[3:5], tokens[3:5])
        for name in ("token_logits", "best", "rank"):
            assert torch.equal(getattr(actual, name), getattr(expected, name)), name
        ratio = actual.weight.double() / expected.weight.double()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-6, atol=0)
        assert all(map(torch.equal, part, (column[3:5] for column in actual)))


def step_inputs_case(device: str, dtype: torch.dtype) -> None:
    page_size, lengths = 8, [1, 1, 700, 3]
    slots, starts = torch.tensor([4, 0, 2, 5]), torch.tensor([30, 0, 5, 799])
    query_start = torch.tensor([0, 1, 2, 702, 705])
    segments = torch.tensor([[0, 4 * 901, 0, 31], [1, 2 * 120 + 3, 31, 90], [0, 2 * 901, 121, 705],
                             [1, 5 * 120, 826, 101], [0, 5 * 901, 3, 0]])  # fmt: skip
    values = torch.randint(1, 10_000, (927,), dtype=torch.int32)
    found = []
    for backend in ("torch", "triton"):
        pool = torch.zeros(6, 901, dtype=torch.int32, device=device)
        table = torch.zeros(6, 120, dtype=torch.int32, device=device)
        with registry.using(backend):
            write_table_rows_(pool, table, segments.to(device), values.to(device), longest=705)
            rows = StepRows(
                slots=slots.to(device),
                starts=starts.to(device),
                query_start=query_start.to(device),
                num_tokens=sum(lengths),
                longest_query=700,
                num_pages=101,
                page_size=page_size,
            )
            step = gather_step_inputs(pool, table, rows)
        found.append((pool, table, *(getattr(step, f.name) for f in dataclasses.fields(step))))
    for expected, actual in zip(*found, strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    assert found[1][0][2, :705].all()  # the write arrived


SAMPLING_CASES: list[Callable[[str, torch.dtype], None]] = [
    sample_case,
    narrow_case,
    sample_without_filters_case,
    sample_invariance_case,
    sample_extremes_case,
    bitmask_case,
    penalties_case,
    penalties_of_drafts_case,
    token_edits_case,
    token_scores_case,
    step_inputs_case,
]
