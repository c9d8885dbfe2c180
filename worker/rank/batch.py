"""Batch: the inputs of one step as tensors, for eager steps and CUDA graphs alike. A step that runs
on a graph is padded with rows of the tables' dummy slot; all else is the same.

    size                a graph of `size` rows, of one token (or one block) each
    size, num_tokens    a graph of `size` rows of any lengths, `num_tokens` tokens in all

    Plan ──build──> Batch ──gather──> tokens, positions, pages ──forward──> hidden states
                      └──sampling──────────────────────────────sample──> tokens in the pool

A dummy row reads the first tokens of the dummy slot, whose pages are the dummy page, and its token
is written to the second cell of that slot. It writes nothing that a real row reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kernels import SamplingParameters, StepRows, StepTensors, gather_step_inputs
from kernels.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionStep,
    CapturableBackend,
)
from kernels.attention.split import split_extends
from kernels.mla_prefill import Expansion, plan_expanded_rows
from kernels.sparse_attention.plan import split_rows
from kernels.states import StateCache, StateRows
from worker.models.layers.context import (
    AttentionInputs,
    ExpandedInputs,
    ForwardContext,
    KVCache,
    SparseInputs,
)
from worker.models.layers.kv_cache import KVCacheGroup, KVCacheSpec
from worker.plan.plan import Plan, StateStore
from worker.rank.adapter_rows import AdapterRows, adapter_rows
from worker.rank.canvas_rows import canvas_rows, num_known_rows
from worker.rank.padding import GraphSize, pad_rows, split_blocks
from worker.rank.sampling.logprobs import PromptChunk
from worker.rank.sampling.state import ProcessedRows, staged_parameters
from worker.rank.state_rows import DraftRows, arrays_of_states
from worker.rank.tables import DeviceTables, ragged_ranges
from worker.rank.transfer import (
    Arrays,
    IntArray,
    StagedArrays,
    Tensors,
    Uploader,
    send,
    uploader_to,
)

if TYPE_CHECKING:
    from worker.rank.verification import SpeculativeRows


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingBatch:
    """Sampling parameters and destinations of the S tokens that a step samples."""

    staged: StagedArrays | None
    """Arrays [S] on the device: destinations and tokens; if any row is random, or a graph samples,
    also positions, seeds, temperature, top_k, top_p and log_min_p. None if the compiled CPU library
    samples."""
    parameters: SamplingParameters | None
    """Sampling parameters of the rows; None if all are greedy, or if a graph samples."""
    num_samples: int
    tokens: torch.Tensor | None
    """[S] int64: indices of the tokens from whose logits the step samples; None for all tokens."""
    destinations: torch.Tensor
    """[S] int64: cells of the flat token pool to which the sampled tokens are written."""
    filters: tuple[str, ...]
    """Filters (of top_k, top_p and log_min_p) that at least one row uses."""
    processed: ProcessedRows | None
    """Rows with logits processors or log-probabilities; None if there are none."""
    is_captured: bool = False
    """Whether sampling runs on a graph, which samples all rows, including padding."""
    sampled_rows: Sequence[int] | None = None
    """Rows sampled by the Plan, if a graph samples all rows; None if the Plan samples all rows."""
    speculative: SpeculativeRows | None = None
    """Speculative rows, whose sampled tokens verify their drafts; None if there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Inputs of one step with R rows and T tokens in total, and its sampling inputs."""

    rows: IntArray
    """[R, 4] on the host: slot, start, length, number of trailing positions that sample a token."""
    num_rows: int
    """Number of leading rows that come from the Plan; padding follows."""
    num_decodes: int
    """Number of leading rows with one token; 0 if the compiled CPU library runs the model."""
    ends: Sequence[int]
    """Upper bounds on the rows' sequence lengths, on the host; exact if the step is eager and the
    host knows the positions of all rows."""
    staged: StagedArrays | None
    """Arrays slots [R], starts [R] and query_start [R + 1], int64, on the device. If layers keep
    states, also the chunks of the rows (`StateRows`) and, if `has_replay`, the arrays of
    `draft_arrays`. If `has_adapters`, also adapter_slots and adapter_tokens (`LoraTiles`). None if
    the compiled CPU library reads the tables itself."""
    starts: torch.Tensor | None
    """[R] int64: first positions of the rows. If the device computes the positions of speculative
    rows, the starts in `rows` are only the planned ones."""
    sampling: SamplingBatch | None
    """How the step samples; None if it samples nothing."""
    prompts: Sequence[PromptChunk]
    """Prompt positions whose next tokens are scored."""
    size: int | None
    """Number of rows of the graph on which the step runs; None for an eager step."""
    num_tokens: int = 0
    """Number of tokens of the graph if its rows may have any length; otherwise 0."""
    logits_indices: torch.Tensor | None = None
    """[S] int64, ascending: indices of the step's tokens whose hidden states the forward pass
    returns; None for all T."""
    adapters: AdapterRows | None = None
    """LoRA adapters of the tokens; None if no token has one."""
    selected_adapters: Tensors | None = None
    """Adapters of the sampled or pooled tokens, as in `staged`; None if none has any, if a graph
    samples, or if the compiled CPU library runs the model."""
    signal: torch.Tensor | None = None
    """[C, hidden]: self-conditioning signal if the last rows are canvases; otherwise None."""

    @property
    def has_adapters(self) -> bool:
        """Whether any token has a LoRA adapter."""
        return self.adapters is not None

    @property
    def has_replay(self) -> bool:
        """Whether the step replays drafts into states, or keeps their inputs for a later replay."""
        return self.staged is not None and "kept" in self.staged.kinds


class BatchBuilder:
    """Applies the writes of Plans to the tables, and builds batches of their rows.

    Args:
        tables: tokens, pages and sampling parameters of all slots.
        is_native: whether the compiled CPU library runs the model.
    """

    def __init__(self, tables: DeviceTables, *, is_native: bool = False) -> None:
        self._tables = tables
        self._is_native = is_native
        self._uploader = uploader_to(tables.device)

    def build(
        self,
        plan: Plan,
        *,
        uploader: Uploader | None = None,
        size: int | None = None,
        num_tokens: int = 0,
        speculative: SpeculativeRows | None = None,
        drafts: DraftRows | None = None,
    ) -> Batch | None:
        """Applies the Plan's writes and builds its batch; None for a Plan without rows.

        Args:
            plan: the step.
            uploader: copies the staged arrays to the device; None copies on the current stream.
            size: number of rows (blocks of a block-diffusion model) of the graph on which the step
                runs; None for an eager step.
            num_tokens: number of tokens of that graph if its rows may have any length; otherwise 0.
            speculative: the Plan's speculative rows; None if there are none.
            drafts: the Plan's draft rows, for layers with states; None if nothing is replayed and
                no inputs are kept.
        """
        tables, groups = self._tables, list[Arrays]()
        if not plan.rows:
            tables.apply(plan)
            return None
        writes = tables.stage(plan) if plan.admits or plan.page_writes else None
        if writes is not None:
            groups.append(writes)
        rows = [(row.slot, row.start, row.length, row.num_samples) for row in plan.rows]
        table = np.array(rows, dtype=np.int64)
        processed = None
        if tables.sampling.params and tables.block_size == 1:  # else BlockDecoder gathers them
            processed = tables.sampling.gather(table)
        graph = GraphSize(size, num_tokens)
        batch = _StagedBatch(
            *(tables, table, processed, graph, groups, self._is_native),
            stores=plan.state_stores,
            drafts=drafts,
        )
        if self._is_native:  # it reads the host's arrays
            staged: Sequence[Tensors] = [
                {name: torch.from_numpy(array) for name, array in group.items()} for group in groups
            ]
        else:
            staged = send(groups, uploader or self._uploader)
        if writes is not None:
            tables.write(staged[0])
        return batch.finish(staged, speculative)

    def build_padding(self, size: int, num_tokens: int = 0, *, has_adapters: bool = False) -> Batch:
        """A batch that only has dummy rows, to capture a graph of `size` rows; `num_tokens` as in
        `build`, `has_adapters` as in Batch."""
        groups, none = list[Arrays](), np.zeros((0, 4), dtype=np.int64)
        graph = GraphSize(size, num_tokens, has_adapters)
        batch = _StagedBatch(self._tables, none, None, graph, groups, self._is_native)
        return batch.finish(send(groups, self._uploader), None)


class _StagedBatch:
    """A batch under construction: its arrays are staged, but not on the device yet.

    Args:
        tables: the rank's tables.
        table: the Plan's rows [R, 4], as in Batch.
        processed: rows with logits processors or log-probabilities.
        graph: size of the graph on which the step runs.
        groups: receives the arrays to copy to the device.
        is_native: whether the compiled CPU library runs the model, which needs no row arrays.
        stores: snapshots to take of the rows' states.
        drafts: the step's draft rows, for layers with states; None if they are not needed.
    """

    def __init__(
        self,
        tables: DeviceTables,
        table: IntArray,
        processed: ProcessedRows | None,
        graph: GraphSize,
        groups: list[Arrays],
        is_native: bool,
        *,
        stores: Sequence[StateStore] = (),
        drafts: DraftRows | None = None,
    ) -> None:
        self._tables = tables
        self._processed = processed
        size = self._size = graph.rows
        self._ragged_tokens = graph.tokens
        self._num_rows = len(table)
        is_uniform = size is not None and not graph.tokens
        self._is_captured = is_uniform and processed is None and tables.block_size == 1
        if size is not None:
            if tables.block_size > 1:
                table = split_blocks(table, tables.block_size)
            self._num_rows = len(table)
            table = pad_rows(table, size, graph.tokens, tables)
        self._rows = table
        slots, starts, lengths, num_samples = np.ascontiguousarray(table.T)
        query_ends = np.cumsum(lengths)
        self._num_tokens = int(query_ends[-1])
        self._adapters = None
        if tables.adapters is not None:
            rows = tables.adapters[slots], lengths, tables.max_loras
            is_capture = graph.has_adapters
            self._adapters = adapter_rows(*rows, is_eager=size is None, is_capture=is_capture)
        self._row_group = -1
        if not is_native:
            self._row_group = len(groups)
            groups.append(self._row_arrays(query_ends, stores, drafts))
        self._sampled_rows: list[int] | None = None
        if self._is_captured:
            (sampled_rows,) = np.nonzero(num_samples)
            is_all = len(sampled_rows) == self._num_rows
            self._sampled_rows = None if is_all else sampled_rows.tolist()
            # The graph samples every row. Tokens of rows that do not sample are written to the same
            # cell as those of padding.
            slots = np.where(num_samples, slots, tables.dummy_slot)
            cells = slots, np.where(num_samples, starts + lengths, 1), query_ends - 1
        else:
            cells = sample_cells(table, query_ends)
        self._num_samples = len(cells[0])
        self._has_parameters = False
        self._filters: tuple[str, ...] = ()
        self._max_top_k = 0
        self._sampling_group = -1
        if self._num_samples:
            self._sampling_group = len(groups)
            groups.append(self._sampling_arrays(*cells))
        self._selected_group = -1
        is_selected = size is None or (tables.adapts_logits and not self._is_captured)
        if self._adapters is not None and is_selected and self._num_samples and not is_native:
            self._selected_group = len(groups)
            groups.append(self._adapters.selected(cells[2]))

    def finish(self, staged: Sequence[Tensors], speculative: SpeculativeRows | None) -> Batch:
        """The batch, given the arrays on the device, in the order in which they were staged."""
        placement = None if speculative is None else speculative.on_device
        lengths = self._rows[:, 2]
        ends = (self._rows[:, 1] + lengths).tolist()
        rows: StagedArrays | None = None
        starts: torch.Tensor | None = None
        if self._row_group >= 0:
            found = staged[self._row_group]
            assert isinstance(found, StagedArrays), "only the compiled library reads host arrays"
            rows, starts = found, found["starts"]
        if placement is not None and starts is not None:
            starts, ends = placement.starts(starts), placement.last_ends
        if self._size is not None:
            ends = [self._tables.max_positions] * self._size
        sampling = None
        if self._num_samples:
            sampling = self._sampling(staged[self._sampling_group], speculative)
        logits_indices = None
        # Unless prompts are scored, only sampled positions need hidden states. For running blocks,
        # BlockDecoder selects the positions.
        prompts = () if self._processed is None else self._processed.prompts
        if self._size is None and self._tables.block_size == 1 and not prompts:
            logits_indices = None if sampling is None else sampling.tokens
        return Batch(
            rows=self._rows,
            num_rows=self._num_rows,
            num_decodes=0 if self._ragged_tokens or rows is None else count_decodes(lengths),
            ends=ends,
            staged=rows,
            starts=starts,
            sampling=sampling,
            prompts=prompts,
            size=self._size,
            num_tokens=self._ragged_tokens,
            logits_indices=logits_indices,
            adapters=self._adapters,
            selected_adapters=None if self._selected_group < 0 else staged[self._selected_group],
        )

    def _row_arrays(
        self, query_ends: IntArray, stores: Sequence[StateStore], drafts: DraftRows | None
    ) -> dict[str, npt.NDArray[Any]]:
        """Arrays of `Batch.staged`."""
        tables, rows = self._tables, self._rows
        slots, starts, _, _ = np.ascontiguousarray(rows.T)
        arrays: dict[str, npt.NDArray[Any]] = {
            "slots": slots,
            "starts": starts,
            "query_start": np.append(0, query_ends),
        }
        if tables.keeps_states:
            arrays |= arrays_of_states(rows, stores, drafts, tables, self._ragged_tokens)
        if self._adapters is not None:
            # These come last: graphs without adapters read a prefix of the same buffer.
            arrays |= self._adapters.all()
        return arrays

    def _sampling_arrays(
        self, slots: IntArray, ends: IntArray, tokens: IntArray
    ) -> dict[str, npt.NDArray[Any]]:
        arrays: dict[str, npt.NDArray[Any]] = {
            "destinations": slots * self._tables.token_stride + ends,
            "tokens": tokens,
        }
        state = self._tables.sampling
        if self._is_captured or state.any_random(slots):
            self._has_parameters = not self._is_captured
            arrays |= state.columns(slots, ends)
            self._filters = state.filters(slots)
            self._max_top_k = int(state.top_k[slots].max())
        return arrays

    def _sampling(self, staged: Tensors, speculative: SpeculativeRows | None) -> SamplingBatch:
        placement = None if speculative is None else speculative.on_device
        destinations, parameters = staged["destinations"], None
        if placement is not None:
            destinations = placement.destinations(destinations)
        if self._has_parameters:
            positions = staged["positions"]
            if placement is not None:
                positions = placement.sample_positions(positions)
            parameters = staged_parameters(staged, positions, self._filters, self._max_top_k)
        samples_all = self._num_samples == self._num_tokens
        return SamplingBatch(
            staged=staged if isinstance(staged, StagedArrays) else None,
            parameters=parameters,
            num_samples=self._num_samples,
            tokens=None if samples_all else staged["tokens"],
            destinations=destinations,
            filters=self._filters,
            processed=self._processed,
            is_captured=self._is_captured,
            sampled_rows=self._sampled_rows,
            speculative=speculative,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardInputs:
    """Arguments of a forward pass."""

    input_ids: torch.Tensor
    """[T] int32: token ids."""
    positions: torch.Tensor
    """[T] int64: positions of the tokens."""
    context: ForwardContext


def gather_inputs(
    batch: Batch,
    tables: DeviceTables,
    kv_caches: Mapping[int, KVCache],
    groups: Sequence[KVCacheGroup],
    backend: AttentionBackend,
    states: Mapping[int, StateCache] | None = None,
    state_rows: StateRows | None = None,
    *,
    with_lengths: bool = False,
) -> ForwardInputs:
    """Gathers tokens, positions and pages of the batch's rows from the tables.

    Args:
        batch: the step's batch; its arrays are on the device.
        tables: the rank's tables, to which the Plan's writes have been applied.
        kv_caches: KV caches by layer.
        groups: groups of layers, each with its own pages.
        backend: attention backend; plans the step.
        states: state caches by linear-attention layer.
        state_rows: slots and snapshots of the rows for these layers.
        with_lengths: whether the model needs the lengths of the rows (bidirectional encoders).
    """
    assert batch.staged is not None, "the compiled library gathers its own inputs"
    assert batch.starts is not None, "the compiled library gathers its own inputs"
    # Rows: on a graph, any row may be as long as the graph's number of tokens allows.
    lengths, longest = batch.rows[:, 2], longest_row(batch, tables.max_model_len)
    rows = StepRows(
        slots=batch.staged["slots"],
        starts=batch.starts,
        query_start=batch.staged["query_start"],
        num_tokens=int(lengths.sum()),
        longest_query=longest,
        num_pages=-(-max(batch.ends) // tables.page_size),
        page_size=tables.page_size,
    )
    # Attention: rows with one token come first and are planned separately from longer ones.
    plan = backend.plan
    if batch.size is not None:
        assert isinstance(backend, CapturableBackend), "this backend runs eager steps only"
        plan = backend.prepare_for_capture
    last = num_known_rows(batch.rows, batch.signal)
    border, query_start = batch.num_decodes, None
    if border < last:
        query_start = batch.staged["query_start"][border : last + 1]
        query_start = (query_start - border if border else query_start).int()
    # Groups of layers: tokens and positions are the same for all groups, pages are not.
    by_layer: dict[int, AttentionInputs] = {}
    for group in groups:
        step = gather_step_inputs(tables.token_pool, tables.group_tables[group.page_table], rows)
        parts = _attention_rows(batch, step, tables, query_start, group.spec)
        inputs = _attention_inputs(parts, step, group.spec, plan, is_eager=batch.size is None)
        if batch.signal is not None:
            rows_of_all = (batch.rows, batch.ends, last, batch.staged["query_start"])
            canvases = plan(canvas_rows(*rows_of_all, batch.num_tokens, step, tables, group.spec))
            inputs = replace(inputs, canvases=canvases, num_canvas_tokens=len(batch.signal))
        by_layer.update(dict.fromkeys(group.layers, inputs))
    context = ForwardContext(
        kv_caches=kv_caches,
        attention=by_layer,
        num_decode_tokens=batch.num_decodes,
        logits_indices=batch.logits_indices,
        states=states or {},
        state_rows=state_rows,
        signal=batch.signal,
        row_lengths=lengths.tolist() if with_lengths else (),
    )
    return ForwardInputs(input_ids=step.input_ids, positions=step.positions, context=context)


def longest_row(batch: Batch, max_model_len: int) -> int:
    """Number of tokens of the longest row; an upper bound if a graph runs rows of any length."""
    if batch.num_tokens:
        return min(batch.num_tokens, max_model_len)
    return int(batch.rows[:, 2].max())


_Parts = tuple[AttentionMetadata | None, AttentionMetadata | None]
"""Attention metadata of rows with one token, and of longer rows; None for a part without rows."""


def _attention_inputs(
    parts: _Parts,
    step: StepTensors,
    spec: KVCacheSpec,
    plan: Callable[[AttentionMetadata], AttentionStep],
    *,
    is_eager: bool,
) -> AttentionInputs:
    """Attention metadata of a group's rows, planned by the backend. Some queries may attend to a
    selection of tokens, and some rows of an eager step may use expanded latents (MLA)."""
    whole, sparse, dense, expanded = parts, None, None, None
    if spec.top_k:
        parts, sparse = _split(parts, step.positions, spec.top_k)
    if sparse is not None and spec.has_dense_layers:
        decode, extend = (None if part is None else plan(part) for part in whole)
        dense = AttentionInputs(slot_mapping=step.slot_mapping, decode=decode, extend=extend)
    if spec.expansion is not None and is_eager:
        parts, expanded = _split_prompts(parts, spec.expansion)
    decode, extend = (None if part is None else plan(part) for part in parts)
    return AttentionInputs(
        slot_mapping=step.slot_mapping,
        decode=decode,
        extend=extend,
        sparse=sparse,
        expanded=expanded,
        dense=dense,
    )


def _split(
    parts: _Parts, positions: torch.Tensor, top_k: int
) -> tuple[_Parts, SparseInputs | None]:
    """Splits off the queries of a step that use sparse attention."""
    rows = split_rows(*parts, positions, top_k)
    if rows is None:
        return parts, None
    decode = rows.decode
    return (decode, rows.extend), SparseInputs(
        queries=rows.queries,
        tokens=rows.tokens,
        others=rows.others,
        num_other_decodes=0 if decode is None else len(decode.seq_lens_host),
    )


def _split_prompts(parts: _Parts, expansion: Expansion) -> tuple[_Parts, ExpandedInputs | None]:
    """Separates rows of an eager step that are cheaper with expanded latents (MLA)."""
    decode, extend = parts
    if extend is None:
        return parts, None
    lengths = zip(extend.query_lens_host, extend.seq_lens_host, strict=True)
    num_decodes = 0 if decode is None else len(decode.seq_lens_host)
    rows = split_extends(extend, [expansion.saves_work(*row) for row in lengths], num_decodes)
    if rows is None:
        return parts, None
    return (decode, rows.others), ExpandedInputs(
        rows=plan_expanded_rows(rows.selected, expansion.most_keys),
        tokens=rows.tokens,
        others=rows.other_tokens,
    )


def _attention_rows(
    batch: Batch,
    step: StepTensors,
    tables: DeviceTables,
    query_start: torch.Tensor | None,
    spec: KVCacheSpec,
) -> _Parts:
    """Attention metadata of the rows of one token, which come first, and of the longer ones; None
    for a part without rows. `query_start`: offsets of the longer rows' tokens."""
    border, ends, last = batch.num_decodes, batch.ends, num_known_rows(batch.rows, batch.signal)
    decode, extend = None, None
    if border:
        decode = AttentionMetadata(
            page_table=step.page_rows[:border],
            seq_lens=step.seq_lens[:border],
            seq_lens_host=ends[:border],
            page_size=tables.page_size,
            window=spec.window,
            is_chunked=spec.is_chunked,
        )
    if query_start is not None:
        extend = AttentionMetadata(
            page_table=step.page_rows[border:last],
            seq_lens=step.seq_lens[border:last],
            seq_lens_host=ends[border:last],
            query_start=query_start,
            query_lens_host=() if batch.num_tokens else batch.rows[border:last, 2].tolist(),
            num_queries=batch.num_tokens,
            page_size=tables.page_size,
            block_size=tables.block_size,
            window=spec.window,
            is_chunked=spec.is_chunked,
        )
    return decode, extend


def count_decodes(lengths: IntArray) -> int:
    """Number of leading rows with one token, including speculative rows without drafts."""
    (longer,) = np.nonzero(lengths > 1)
    return int(longer[0]) if len(longer) else len(lengths)


def sample_cells(table: IntArray, query_ends: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Tokens that rows [R, 4] sample, as three arrays [S]: slot, position of the new token, index
    of the step's token from whose logits it is sampled."""
    slots, starts, lengths, num_samples = table.T
    ends = starts + lengths
    (samples,) = np.nonzero(num_samples)
    if len(samples) == num_samples.sum():
        return slots[samples], ends[samples], query_ends[samples] - 1
    return (
        np.repeat(slots, num_samples),
        ragged_ranges(ends - num_samples + 1, num_samples),
        ragged_ranges(query_ends - num_samples, num_samples),
    )
