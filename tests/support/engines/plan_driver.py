"""Drives a runner with hand-made Plans, and records the logits of every sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from worker.config import EngineConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.plan.plan import Admit, PageWrite, Plan, PlannedRow, Row
from worker.rank.adapter_rows import logits_tiles
from worker.rank.runner import ModelRunner
from worker.rank.sampler import sample

PAGE_SIZE = 16


@dataclass(kw_only=True)
class Request:
    prompt: list[int]
    new_tokens: int = 4
    arrival: int = 0
    """First step in which the request may run."""
    slot: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    computed: int = 0
    prefix_of: Request | None = None
    """Request whose full prompt pages are shared; only for models with one group of layers."""
    adapter: int = 0
    """Slot of the LoRA adapter; 0 if there is none."""
    pages: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.new_tokens


def make_runner(
    folder: str, group: TensorParallelGroup | None = None, **options: object
) -> ModelRunner:
    settings: dict[str, object] = {
        "model": folder,
        "device": "cpu",
        "cpu_threads": 1,
        "max_num_seqs": 8,
        "page_size": PAGE_SIZE,
        "kv_cache_tokens": 4096,
        **options,
    }
    group = group or TensorParallelGroup.alone(torch.device("cpu"))
    runner = ModelRunner(EngineConfig.of(**settings), group)
    runner.allocate(runner.hello().num_pages)
    return runner


def generate(
    runner: ModelRunner, requests: Sequence[Request], *, chunk: int = 1024, page_seed: int = 0
) -> None:
    """Runs all requests to completion in shared steps; fills their tokens and logits."""
    num_pages = runner.hello().num_pages
    free = (np.random.default_rng(page_seed).permutation(num_pages - 1) + 1).tolist()
    step = 0
    while not all(request.is_done for request in requests):
        admits, writes, shares = [], [], []
        for request in requests:
            if request.arrival > step or request.is_done:
                continue
            if request.computed == 0:
                admits.append(_admit(request))
                _allocate(request, free, runner.config.cache.page_size)
                for group in range(len(runner._tables.group_tables)):
                    pages = [free.pop() for _ in request.pages] if group else request.pages
                    # In two writes, like a scheduler that allocates page by page.
                    writes.append(PageWrite(request.slot, 0, pages[:1], group))
                    writes.append(PageWrite(request.slot, 1, pages[1:], group))
            shares.append((request, min(chunk, request.total - request.computed)))
        shares.sort(key=lambda share: share[1] > 1)
        rows: list[Row] = [
            PlannedRow(
                request.slot, request.computed, length, request.computed + length == request.total
            )
            for request, length in shares
        ]
        step += 1
        _run(runner, Plan(step, admits, writes, rows), shares)


def _allocate(request: Request, free: list[int], page_size: int) -> None:
    if request.prefix_of is not None:
        owner = request.prefix_of
        # At least the last token is computed again to get its logits.
        num_shared = (min(len(request.prompt), len(owner.prompt)) - 1) // page_size
        assert request.prompt[: num_shared * page_size] == owner.prompt[: num_shared * page_size]
        request.pages = owner.pages[:num_shared]
        request.computed = num_shared * page_size
    length = len(request.prompt) + request.new_tokens
    request.pages += [free.pop() for _ in range(-(-length // page_size) - len(request.pages))]


def _admit(request: Request) -> Admit:
    tokens = np.asarray(request.prompt, dtype="<i4").tobytes()
    return Admit(
        request.slot,
        tokens,
        request.temperature,
        request.top_k,
        request.top_p,
        request.min_p,
        request.seed,
        adapter=request.adapter,
    )


@torch.inference_mode()
def _run(runner: ModelRunner, plan: Plan, shares: list[tuple[Request, int]]) -> None:
    batch = runner._builder.build(plan)
    assert batch is not None
    hidden = runner.run_model(batch)
    draws: Iterator[tuple[int, torch.Tensor]] = iter(())
    if batch.sampling is not None:
        if batch.sampling.tokens is not None and batch.logits_indices is None:
            hidden = hidden.index_select(0, batch.sampling.tokens)
        adapters = batch.selected_adapters
        tiles = None if adapters is None else logits_tiles(adapters, runner._tables)
        logits = runner.compute_logits(hidden, tiles)
        output = sample(logits.clone(), batch.sampling, runner._tables)
        assert output.tokens is not None
        tokens = output.tokens.tolist()
        assert len(tokens) == batch.sampling.num_samples
        draws = iter(zip(tokens, logits, strict=True))
    for row, (request, length) in zip(plan.rows, shares, strict=True):
        request.computed += length
        if row.num_samples:
            token, row_logits = next(draws)
            request.tokens.append(token)
            request.logits.append(row_logits.clone())
