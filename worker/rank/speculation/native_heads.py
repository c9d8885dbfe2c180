"""Drafting with the model's own head on CPU, in the compiled library. `heads.py` describes what the
head computes and caches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.native import NativeDrafter, NativeHead
from worker.models.layers.context import KVCache
from worker.plan.plan import DraftRow
from worker.rank.batch import Batch
from worker.rank.speculation.base import DraftRequest, Guesses
from worker.rank.speculation.draft_model import NativeProposer
from worker.rank.tables import DeviceTables
from worker.rank.verification import AcceptedTokens


class NativeHeadProposer(NativeProposer):
    """Drafts on CPU with the model's MTP head.

    Args:
        head: the head, in the compiled library.
        tables: the rank's tables; drafts are written to the token pool, which the model reads.
        cache: KV cache of the head's layer.
        most: maximum number of drafts per row.
    """

    def __init__(self, head: NativeHead, tables: DeviceTables, cache: KVCache, most: int) -> None:
        super().__init__(tables)
        self._head, self._tables = head, tables
        # HAZARD: the library only keeps its address, so it must outlive the head.
        self._outputs = torch.zeros(len(tables.token_pool), head.hidden_size)
        """[slots, hidden]: output of the head at the position before the newest token."""
        head.bind((cache.k, cache.v), self._outputs)
        self._drafter = NativeDrafter(head, self._slots, most)

    def follow(self, batch: Batch, hidden: torch.Tensor, accepted: AcceptedTokens | None) -> None:
        """Computes the head for the rows of a sampled step.

        Args:
            batch: the step's batch.
            hidden: fp32 [T, hidden]: hidden states of all its tokens.
            accepted: its accepted tokens; None if there are no speculative rows.
        """
        tables, lengths = self._tables, batch.rows[:, 2]
        latest = np.cumsum(lengths) - 1
        if accepted is not None and accepted.acceptance is not None:
            rows = [number for number, row in enumerate(accepted.rows) if isinstance(row, DraftRow)]
            counts = accepted.acceptance.counts
            assert isinstance(counts, np.ndarray), "on CPU, the host verifies rows"
            latest[rows] += counts - lengths[rows]
        outputs = self._head.forward(
            batch.rows, tables.token_pool, tables.page_table, hidden.contiguous(), latest
        )
        self._outputs.numpy()[batch.rows[:, 0]] = outputs.numpy()

    def propose(self, requests: Sequence[DraftRequest], threshold: float) -> list[Guesses]:
        """Drafts for each request, as many as are worth verifying."""
        rows = np.ones((len(requests), 4), dtype=np.int64)
        for number, request in enumerate(requests):
            rows[number] = request.slot, request.num_tokens - 1, 1, request.num_drafts
        drafts = self._drafter.draft(rows, threshold)
        return list(map(Guesses, drafts.tokens, drafts.levels, drafts.drafted))
