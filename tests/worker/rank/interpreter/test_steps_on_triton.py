"""Step preparation and sampling on Triton against torch, without a model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from kernels import apply_token_bitmask, registry
from kernels.attention import AttentionBackend, AttentionMetadata
from kernels.registry import Backend
from worker.models.layers.kv_cache import KVCacheSpec, group_layers
from worker.plan.plan import Admit, LogitsParams, PageWrite, Plan, PlannedRow, StepResult
from worker.rank.batch import Batch, BatchBuilder, ForwardInputs, gather_inputs
from worker.rank.sampler import SamplerOutput, sample
from worker.rank.tables import DeviceTables

VOCAB, PAGE_SIZE = 4300, 8
ONE_LAYER = group_layers([KVCacheSpec(num_kv_heads=1, head_dim=16, dtype=torch.float32)]).groups
RULES = [
    None,
    LogitsParams(5, frequency_penalty=1.0, presence_penalty=-0.5, num_logprobs=3),
    LogitsParams(9, repetition_penalty=1.5, bad_words=[[3], [7, 9], [50, 51, 52], [VOCAB + 2]]),
    LogitsParams(
        4,
        allowed_token_ids=np.array([5, 31, 32, 4299, VOCAB + 7], "<i4").tobytes(),
        bias_token_ids=[31],
        biases=[2.0],
    ),
    LogitsParams(
        3,
        min_tokens=2,
        stop_token_ids=list(range(0, VOCAB, 2)),
        num_logprobs=0,
        logprob_token_ids=[4299, 0, 17],
    ),
    LogitsParams(3, min_tokens=40, stop_token_ids=list(range(1, VOCAB, 2)), num_logprobs=20),
    None,
]
SAMPLING = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (0.8, 0, 0.9, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.2, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (1.0, 30, 0.8, 0.05),
    (1.0, 0, 1.0, 0.0),
]


def make_tables() -> DeviceTables:
    return DeviceTables(
        max_num_seqs=8,
        max_model_len=80,
        page_size=PAGE_SIZE,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
    )


def make_plans() -> list[Plan]:
    """A mixed step of chunks, then decodes of all, then one without writes, then one of no rows."""
    rng = np.random.default_rng(3)
    lengths = [6, 12, 40, 11, 9, 8, 1]
    admits = [
        Admit(
            slot, rng.integers(0, VOCAB, length).astype("<i4").tobytes(), *sampling, slot - 3, rules
        )
        for slot, (length, sampling, rules) in enumerate(zip(lengths, SAMPLING, RULES, strict=True))
    ]
    writes = [PageWrite(slot, 0, [10 * slot + 1, 10 * slot + 2]) for slot in range(7)]
    writes.append(PageWrite(2, 2, [77, 3, 78, 79]))
    chunks = [
        PlannedRow(6, 0, 1, 1),
        *(PlannedRow(s, 0, n, s != 2) for s, n in enumerate(lengths[:6])),
    ]
    chunks[3] = PlannedRow(2, 0, 33, 0)
    decodes = [PlannedRow(s, n, 1, 1) for s, n in enumerate(lengths) if s != 2]
    more = [PlannedRow(s, n + 1, 1, 1) for s, n in enumerate(lengths) if s != 2]
    return [
        Plan(1, admits, writes, chunks),
        Plan(2, [], [PageWrite(4, 2, [55])], [*decodes, PlannedRow(2, 33, 7, 1)]),
        Plan(3, [], [], [*more, PlannedRow(2, 40, 1, 1)][:5]),
        Plan(4, [], [PageWrite(0, 2, [4])], []),
    ]


class Unplanned(AttentionBackend):
    """Plans nothing: a step is its metadata."""

    def plan(self, metadata: AttentionMetadata) -> Any:
        return metadata


def draw(batch: Batch, tables: DeviceTables, logits: torch.Tensor) -> SamplerOutput:
    mask = torch.full((1, -(-VOCAB // 32)), -1, dtype=torch.int32)
    mask[0, :100] = 0x55555555  # a grammar on the first row
    apply_token_bitmask(logits, mask, rows=torch.tensor([0]))
    assert batch.sampling is not None
    return sample(logits, batch.sampling, tables)


def run(
    backend: Backend,
) -> tuple[list[tuple[Batch, ForwardInputs] | None], list[StepResult], DeviceTables]:
    generator = torch.Generator().manual_seed(1)
    found: list[tuple[Batch, ForwardInputs] | None] = []
    results = []
    with registry.using(backend), torch.inference_mode():
        tables = make_tables()
        builder = BatchBuilder(tables)
        for plan in make_plans():
            batch = builder.build(plan)
            if batch is None:
                found.append(None)
                continue
            found.append((batch, gather_inputs(batch, tables, (), ONE_LAYER, Unplanned())))
            assert batch.sampling is not None
            logits = torch.randn(batch.sampling.num_samples, VOCAB, generator=generator) * 4
            output = draw(batch, tables, logits)
            assert output.tokens is not None
            results.append(output.add_logprobs(StepResult(plan.seq, output.tokens.tolist(), 0.0)))
    return found, results, tables


def assert_equal_tensors(one: object, other: object) -> None:
    for field in fields(type(one)):  # type: ignore[arg-type]  # dataclasses
        found, reference_value = getattr(one, field.name), getattr(other, field.name)
        if isinstance(reference_value, torch.Tensor):
            assert torch.equal(found, reference_value), field.name


def test_steps_equal_those_on_torch() -> None:
    expected, expected_results, expected_tables = run("torch")
    actual, results, tables = run("triton")
    assert torch.equal(tables.token_pool, expected_tables.token_pool)
    assert torch.equal(tables.page_table, expected_tables.page_table)
    assert actual[3] is None
    for one, other in zip(actual[:3], expected[:3], strict=True):
        assert one is not None
        assert other is not None
        (batch, inputs), (other_batch, other_inputs) = one, other
        assert np.array_equal(batch.rows, other_batch.rows)
        assert_equal_tensors(batch.sampling, other_batch.sampling)
        assert_equal_tensors(inputs, other_inputs)
        attention, other_attention = inputs.context.attention[0], other_inputs.context.attention[0]
        assert_equal_tensors(attention, other_attention)
        for part, names in (("decode", ("seq_lens",)), ("extend", ("seq_lens", "query_start"))):
            own, reference = getattr(attention, part), getattr(other_attention, part)
            assert (own is None) == (reference is None)
            for name in names if own is not None else ():
                assert torch.equal(getattr(own, name), getattr(reference, name)), name
            if own is not None:
                width = reference.page_table.shape[1]
                assert torch.equal(own.page_table[:, :width], reference.page_table)
    for result, reference_value in zip(results, expected_results, strict=True):
        assert result.token_ids == reference_value.token_ids
        for scored, reference in zip(
            result.logprobs or [], reference_value.logprobs or [], strict=True
        ):
            assert (scored is None) == (reference is None)
            if scored is not None and reference is not None:
                assert scored.token_ids == reference.token_ids
                assert scored.rank == reference.rank
                assert scored.logprobs == pytest.approx(reference.logprobs, abs=1e-5)
    assert any(result.logprobs for result in results)
