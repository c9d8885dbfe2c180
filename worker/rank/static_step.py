"""A decode step as a function of buffers that never move: what a CUDA graph captures.

    columns ──forward──> hidden ──sample──> tokens, and the cells of the token pool
                                    ↑
                                  masks (all ones unless a grammar says otherwise)

A step of fewer rows is padded with rows of the tables' dummy slot: they read its first token, whose
page is the dummy page, and draw into its second cell. Nothing else is read or written that a real
row could see. Lengths are bounded by the longest row the tables hold, so that the number of splits
in attention depends on the number of rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels import (
    SamplingParameters,
    apply_token_bitmask,
    gather_step_inputs,
    prepare_decode,
    sample_tokens,
)
from kernels.sample_tokens import GREEDY_BELOW
from worker.models.context import ForwardContext, KVCache
from worker.models.decoder import DecoderModel
from worker.rank.sampling.masks import MaskRows
from worker.rank.tables import DeviceTables, IntArray
from worker.rank.transfer import aligned

_INT_COLUMNS = ("slots", "starts", "destinations", "seeds", "top_k")
_FLOAT_COLUMNS = ("temperature", "top_p", "log_min_p")


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticInputs:
    """A step that runs on static buffers, beside what these hold."""

    size: int
    """Rows with padding."""
    num_rows: int
    samples: Sequence[int] | None
    """Rows that draw, where not all do."""
    filters: bool
    """Whether any row filters by top-k, top-p or min-p."""


class StaticStep:
    """The buffers, and the two halves of the step on their leading rows.

    Args:
        model: loaded.
        kv_caches: of all layers.
        tables: tokens, pages and parameters of all slots.
        max_rows: rows of the largest step.
        batch_invariant: whether attention splits rows at fixed places.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_caches: tuple[KVCache, ...],
        tables: DeviceTables,
        *,
        max_rows: int,
        batch_invariant: bool,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._tables = tables
        self._batch_invariant = batch_invariant
        device = tables.token_pool.device
        words = -(-model.config.vocab_size // 32)
        # Zeros are a step of the first slot's first token: harmless to capture on empty tables.
        self._columns = torch.zeros(columns_size(max_rows), dtype=torch.uint8, device=device)
        self._query_start = torch.arange(max_rows + 1, device=device)
        self.hidden = torch.zeros(
            max_rows, model.config.hidden_size, dtype=model.options.dtype, device=device
        )
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._masks = torch.full((max_rows, words), -1, dtype=torch.int32, device=device)

    def load(self, staged: torch.Tensor) -> None:
        """Takes over columns that `fill_columns` made; uint8 on the device."""
        self._columns[: len(staged)].copy_(staged)

    def forward(self, size: int) -> None:
        """Hidden states of the columns' rows, `size` of them."""
        tables = self._tables
        columns = self._views(size)
        step = gather_step_inputs(
            tables.token_pool,
            tables.page_table,
            columns["slots"],
            columns["starts"],
            self._query_start[: size + 1],
            num_tokens=size,
            longest_query=1,
            num_pages=tables.page_table.shape[1],
            page_size=tables.page_size,
        )
        decode = prepare_decode(
            step.page_rows,
            step.seq_lens,
            seq_lens_host=[tables.max_model_len] * size,
            page_size=tables.page_size,
            batch_invariant=self._batch_invariant,
        )
        context = ForwardContext(
            kv_caches=self._kv_caches,
            slot_mapping=step.slot_mapping,
            num_decode_tokens=size,
            decode=decode,
            extend=None,
        )
        self.hidden[:size].copy_(self._model.forward(step.input_ids, step.positions, context))

    def sample(self, size: int, *, filters: bool) -> None:
        """One token for each row; puts them where the next step looks for them."""
        columns = self._views(size)
        logits = self._model.compute_logits(self.hidden[:size])
        apply_token_bitmask(logits, self._masks[:size])
        parameters = SamplingParameters(
            temperature=columns["temperature"],
            seeds=columns["seeds"],
            positions=columns["starts"] + 1,
            top_k=columns["top_k"] if filters else None,
            top_p=columns["top_p"] if filters else None,
            log_min_p=columns["log_min_p"] if filters else None,
        )
        tokens = sample_tokens(logits, parameters, out=self.tokens[:size])
        self._tables.flat_tokens.index_copy_(0, columns["destinations"], tokens.int())

    def set_masks(self, masks: MaskRows, samples: Sequence[int] | None) -> torch.Tensor:
        """Masks some draws of the next `sample`; returns the rows, for `reset_masks`."""
        rows = masks.rows if samples is None else masks.rows_among(samples)
        self._masks.index_copy_(0, rows, masks.bitmask)
        return rows

    def reset_masks(self, rows: torch.Tensor) -> None:
        """Leaves all tokens to the rows' draws again."""
        self._masks.index_fill_(0, rows, -1)

    def _views(self, size: int) -> dict[str, torch.Tensor]:
        views = {}
        for name, (start, stop) in _places(size).items():
            dtype = torch.int64 if name in _INT_COLUMNS else torch.float32
            views[name] = self._columns[start:stop].view(dtype)
        return views


def columns_size(size: int) -> int:
    """Bytes of the columns of a step with so many rows."""
    return sum(aligned(stop - start) for start, stop in _places(size).values())


def fill_columns(
    rows: IntArray, tables: DeviceTables, size: int
) -> tuple[npt.NDArray[np.uint8], StaticInputs]:
    """The columns of a step of decode rows [R, 4] (as in StepInputs), padded to `size` rows."""
    content = np.zeros(columns_size(size), dtype=np.uint8)
    columns = {
        name: content[start:stop].view(np.int64 if name in _INT_COLUMNS else np.float32)
        for name, (start, stop) in _places(size).items()
    }
    slots, starts, _, draws = rows.T
    num_rows, dummy = len(rows), tables.token_pool.shape[0] - 1
    columns["slots"][:num_rows] = slots
    columns["slots"][num_rows:] = dummy
    columns["starts"][:num_rows] = starts
    # What a row draws that should not draw goes where padding draws to.
    columns["destinations"][:] = dummy * tables.token_stride + 1
    (samples,) = np.nonzero(draws)
    slots, starts = slots[samples], starts[samples]
    columns["destinations"][samples] = slots * tables.token_stride + starts + 1
    parameters = tables.sampling
    columns["seeds"][samples] = parameters.seed[slots]
    columns["temperature"][samples] = parameters.temperature[slots]
    columns["top_k"][samples] = parameters.top_k[slots]
    columns["top_p"][:] = 1.0
    columns["top_p"][samples] = parameters.top_p[slots]
    columns["log_min_p"][:] = -np.inf
    columns["log_min_p"][samples] = parameters.log_min_p[slots]
    filters = (parameters.top_k[slots] > 0) | (parameters.top_p[slots] < 1.0)
    filters |= parameters.log_min_p[slots] > -np.inf
    filters &= parameters.temperature[slots] >= GREEDY_BELOW
    inputs = StaticInputs(
        size=size,
        num_rows=num_rows,
        samples=None if len(samples) == num_rows else samples.tolist(),
        filters=bool(filters.any()),
    )
    return content, inputs


def _places(size: int) -> dict[str, tuple[int, int]]:
    """Where each column's bytes begin and end."""
    places = {}
    start = 0
    for name in (*_INT_COLUMNS, *_FLOAT_COLUMNS):
        width = 8 if name in _INT_COLUMNS else 4
        places[name] = (start, start + width * size)
        start += aligned(width * size)
    return places
