"""Draft model on the device: drafts in CUDA graphs, without making the host wait.

    follow   computes each step's rows after the target's forward pass: prompts, decodes, drafts
    draft    one token after another, after the newest token of each speculative row

The draft model's KV cache therefore covers the same positions as the target's, in pages with the
same ids (if the target has sliding windows, those of its first group of full-attention layers), and
a cached prefix is cached for both. Each draft is one decode step of all rows; a row that needs
fewer drafts than others repeats its last one, without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from kernels import TokenCells, sample_tokens
from kernels.attention import AttentionBackend, AttentionSettings, create_attention_backend
from worker.config import EngineConfig
from worker.models.architectures.decoder import DecoderModel
from worker.models.layers.kv_cache import KVCacheLayout, layout_of
from worker.plan.plan import DraftRow
from worker.rank.batch import Batch, gather_inputs
from worker.rank.kv_cache import allocate_kv_caches
from worker.rank.placement import DevicePlacement
from worker.rank.sampling.state import FILTERS, staged_parameters
from worker.rank.speculation.base import Capture, DraftRequest, Guesses, Proposer
from worker.rank.speculation.calibration import Calibration
from worker.rank.speculation.draft_model import DRAFT_DTYPE, load_draft_model
from worker.rank.speculation.draft_rows import DraftingRows, decode_batch, drafting_arrays
from worker.rank.tables import DeviceTables
from worker.rank.transfer import IntArray, stage, to_device

_PRIOR, _PRIOR_WEIGHT = 0.7, 1.0
"""Assumed fraction of right guesses before any outcome, and its weight in guesses."""


class DeviceDraftModel:
    """A draft model, replicated on every rank, with its attention backend and cache layout.

    Args:
        config: the engine's configuration, validated by `check_draft_model`.
        device: the rank's device.
        max_model_len: maximum number of tokens of a request.

    Raises:
        ValueError: the draft model's layers differ in KV cache size per token.
    """

    def __init__(self, config: EngineConfig, device: torch.device, max_model_len: int) -> None:
        self.model: DecoderModel = load_draft_model(config, device, max_model_len)
        model_config = self.model.config
        self.backend: AttentionBackend = create_attention_backend(
            "auto",
            AttentionSettings(
                device=device,
                dtype=DRAFT_DTYPE,
                page_size=config.cache.page_size,
                batch_invariant=config.batch_invariant,
                cap=model_config.attention_cap,
                has_sinks=model_config.has_sinks,
                has_latents=model_config.mla is not None,
                most_decodes=config.scheduling.max_num_seqs,
                num_heads=model_config.num_heads,
            ),
        )
        self.layout: KVCacheLayout = layout_of(self.model.layers)
        if len(self.layout.groups) > 1:
            raise ValueError(
                "--speculative-model: models whose layers differ in KV cache per token are not "
                "supported; use another model"
            )


class DeviceModelProposer(Proposer):
    """Drafts with a draft model on the device.

    Samples with the parameters, seeds and keyed noise that the target uses at the same position: if
    the two models' logits agree, so do their tokens, at any temperature.

    Args:
        draft: the draft model.
        tables: the rank's tables; drafts are written to the token pool, which the model reads.
        num_pages: number of pages of the target's KV cache.
        page_size: tokens per page.
    """

    needs_pages = True

    def __init__(
        self, draft: DeviceDraftModel, tables: DeviceTables, num_pages: int, page_size: int
    ) -> None:
        super().__init__(Calibration(len(tables.token_pool), [_PRIOR], _PRIOR_WEIGHT))
        self._draft, self._tables = draft, tables
        self._caches = allocate_kv_caches(num_pages, page_size, draft.layout, tables.device)
        self._packed = torch.empty(0, dtype=torch.uint8)
        self._starts = self._last = torch.empty(0, dtype=torch.int64)
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}

    def follow(self, batch: Batch) -> None:
        """Computes a step's rows, so that the draft model's KV cache also covers them."""
        draft = self._draft
        inputs = gather_inputs(
            batch, self._tables, self._caches, draft.layout.groups, draft.backend
        )
        draft.model.forward(inputs.input_ids, inputs.positions, inputs.context)

    def draft(self, placement: DevicePlacement, windows: Sequence[DraftRow]) -> None:
        """Writes drafts to the token pool after the newest tokens of speculative rows, whose
        positions are on the device; does not wait for it.

        Args:
            placement: positions of the step's speculative rows, on the device.
            windows: the same rows as planned.
        """
        num_passes = placement.longest - 1
        if num_passes:
            last = placement.firsts + placement.lengths - 1
            ends = max(row.start + row.length for row in windows)
            slots = np.array([row.slot for row in windows], dtype=np.int64)
            self._run(slots, placement.newest, last, num_passes, ends)

    def propose(self, requests: Sequence[DraftRequest], threshold: float) -> list[Guesses]:
        """Drafts for each request, as many as are worth verifying; waits for the device."""
        table = np.array(requests, dtype=np.int64)
        slots, newest = np.ascontiguousarray(table[:, 0]), table[:, 1] - 1
        counts, device = table[:, 2], self._tables.device
        places = to_device(torch.from_numpy(np.stack((newest, newest + counts))), device)
        most = int(counts.max())
        self._run(slots, places[0], places[1], most, int((newest + counts).max()) + 1)
        columns = np.minimum(newest[:, None] + 1 + np.arange(most), (newest + counts)[:, None])
        cells = (slots[:, None] * self._tables.token_stride + columns).reshape(-1)
        index = to_device(torch.from_numpy(cells), device)
        sampled = self._tables.flat_tokens.index_select(0, index).tolist()
        guesses = []
        for row, (slot, _, count) in enumerate(requests):
            tokens = sampled[row * most : row * most + count]
            num_worth = self.calibration.num_worth(slot, [0] * count, threshold)
            guesses.append(Guesses(tokens, [0] * count, num_worth))
        return guesses

    def prepare_capture(self, largest: int) -> None:
        """Allocates the static buffers of graphs of up to `largest` rows."""
        device = self._tables.device
        arrays = drafting_arrays(self._tables, np.zeros(0, dtype=np.int64), largest)
        staged = stage(arrays, device)
        self._packed = torch.empty_like(staged.packed)
        self._starts = torch.zeros(largest, dtype=torch.int64, device=device)
        self._last = torch.zeros(largest, dtype=torch.int64, device=device)
        self._graphs.clear()

    def capture(self, size: int, capture: Capture) -> None:
        """Captures a decode step of `size` rows, on dummy rows."""
        tables = self._tables
        staged = stage(drafting_arrays(tables, np.zeros(0, dtype=np.int64), size), tables.device)
        self._packed[: len(staged.packed)].copy_(staged.packed)
        for filters in ((), FILTERS):
            rows = DraftingRows(
                staged=staged.at(self._packed),
                starts=self._starts[:size],
                last=self._last[:size],
                num_pages=-(-tables.max_positions // tables.page_size),
                size=size,
                filters=filters,
                max_top_k=tables.vocab_size,
            )
            self._graphs[size, bool(filters)] = capture(partial(self._sample_next, rows))

    def close(self) -> None:
        """Drops all graphs."""
        self._graphs.clear()

    def _run(
        self,
        slots: IntArray,
        newest: torch.Tensor,
        last: torch.Tensor,
        num_passes: int,
        end: int,
    ) -> None:
        """Drafts `num_passes` tokens for each row, but at most up to positions `last` [F]; all are
        before position `end`."""
        tables, count = self._tables, len(slots)
        filters = tables.sampling.filters(slots)
        sizes = sorted({size for size, _ in self._graphs if size >= count})
        size = sizes[0] if sizes else None
        staged = stage(drafting_arrays(tables, slots, size or count), tables.device)
        if size is None:
            rows = DraftingRows(
                staged=staged,
                starts=newest.clone(),
                last=last,
                num_pages=-(-end // tables.page_size),
                size=None,
                filters=filters,
                max_top_k=int(tables.sampling.top_k[slots].max()),
            )
            for _ in range(num_passes):
                self._sample_next(rows)
            return
        self._packed[: len(staged.packed)].copy_(staged.packed)
        for buffer, values in ((self._starts, newest), (self._last, last)):
            buffer[:count].copy_(values)
            buffer[count:size].zero_()
        replay = self._graphs[size, bool(filters)]
        for _ in range(num_passes):
            replay()

    def _sample_next(self, rows: DraftingRows) -> None:
        """Drafts one token after the latest token of each row, and advances the rows to it."""
        tables, draft = self._tables, self._draft
        inputs = gather_inputs(
            decode_batch(rows, rows.starts, tables),
            *(tables, self._caches, draft.layout.groups, draft.backend),
        )
        hidden = draft.model.forward(inputs.input_ids, inputs.positions, inputs.context)
        positions = rows.starts + 1
        parameters = staged_parameters(rows.staged, positions, rows.filters, rows.max_top_k)
        logits = draft.model.compute_logits(hidden)
        cells = TokenCells(tables.flat_tokens, rows.cells(positions, tables))
        sample_tokens(logits, parameters, cells=cells)
        rows.advance(positions)
