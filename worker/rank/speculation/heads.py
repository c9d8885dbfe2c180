"""Drafting with the model's own head for multi-token prediction (MTP), on CPU and CUDA.

    position       0    1   …   n-1   n               newest token at n
    follow         h,t  h,t …   h,t                   pairs of hidden state i and token i + 1
    draft 1                     └── predicts n + 1    output of the latest pair, kept by slot
    draft 2                           └─ n + 2        pair of that output and draft 1, and so on

In the KV cache, the layer of an MTP head is one more layer of the model. The layer of an EAGLE-3
head has separate planes in the same pages (`KVCacheLayout.beside`). Prefix hits, preemption and
offloading to host memory treat a head's keys and values like those of other layers.

After each step, `follow` computes the head for the step's rows, whose next tokens are then known:
they have been sampled or are part of the prompt. Each cached position thus has the request's own
pair, except that the last position of a prefix hit may have been computed with the next token of
another request. Pairs of drafts are overwritten by the next `follow`.

If there are additional heads, head k creates draft k. Instead of a hidden state of the model, it
reads the output of head k - 1 at the previous position, or zeros at the first position and after a
prefix hit. `follow` computes all heads. The pass for draft k computes head k and the heads after
it, whose caches later passes read. The last head also continues from its own output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kernels.attention import AttentionBackend
from kernels.sample_tokens import GREEDY_BELOW
from worker.models.architectures.decoder import DecoderModel
from worker.models.layers.context import ForwardContext, KVCache
from worker.models.layers.kv_cache import KVCacheGroup
from worker.plan.plan import DraftRow
from worker.rank.batch import Batch, count_decodes, gather_inputs
from worker.rank.placement import DevicePlacement
from worker.rank.sampler import sample_logits
from worker.rank.sampling.state import FILTERS, staged_parameters
from worker.rank.speculation.base import Capture, DraftRequest, Guesses, Proposer
from worker.rank.speculation.calibration import Calibration
from worker.rank.speculation.draft_model import LEAST_PROBABILITIES, PRIOR_WEIGHT, PRIORS
from worker.rank.speculation.draft_rows import DraftingRows, decode_batch, drafting_arrays
from worker.rank.tables import DeviceTables
from worker.rank.transfer import IntArray, stage, to_device
from worker.rank.verification import AcceptedTokens


class DraftingHead(Protocol):
    """A head that drafts: an MTP head or an EAGLE-3 head."""

    hidden_size: int

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs of the head, as in MtpHead."""
        ...

    def compute_logits(
        self, outputs: torch.Tensor, shared: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Computes fp32 logits [R, vocab_size] from outputs [R, hidden], as in MtpHead."""
        ...


class HeadProposer(Proposer):
    """Drafts with the model's MTP heads, which are sharded like the model.

    Samples with the parameters, seeds and keyed noise that the model uses at the same position.

    Args:
        model: the model, whose embedding and LM head the heads use.
        heads: the heads, in order. The first one reads hidden states of the model, each other one
            the outputs of the preceding head at the preceding position.
        tables: the rank's tables; drafts are written to the token pool, which the model reads.
        kv_caches: KV caches by layer, the heads' included.
        groups: groups of the heads' layers.
        backend: attention backend of the heads.
    """

    needs_pages = True

    def __init__(
        self,
        model: DecoderModel,
        heads: Sequence[DraftingHead],
        tables: DeviceTables,
        kv_caches: Mapping[int, KVCache],
        groups: Sequence[KVCacheGroup],
        backend: AttentionBackend,
    ) -> None:
        num_slots = len(tables.token_pool)
        super().__init__(Calibration(num_slots, PRIORS, PRIOR_WEIGHT))
        self._model, self._heads, self._tables = model, heads, tables
        self._caches, self._groups, self._backend = kv_caches, groups, backend
        self._outputs = torch.zeros(
            *(len(heads), num_slots, heads[0].hidden_size),
            dtype=model.options.dtype,
            device=tables.device,
        )
        """[heads, slots, hidden]: outputs of the heads at the position before the newest token."""
        self._buffers: _StaticBuffers | None = None
        """Buffers that graphs read; None before `prepare_capture`."""
        self._follows: dict[tuple[int, int], Callable[[], None]] = {}
        """Graphs of `follow`, by numbers of rows and tokens of the step's graph."""
        self._passes: dict[tuple[int, bool, int], Callable[[], None]] = {}
        """Graphs of passes, by number of rows, whether rows have filters, and number of the pass.
        The graph with the highest pass number also runs all later passes."""

    def admit(self, slot: int, end_token_ids: Sequence[int] = ()) -> None:
        """Resets the slot's state, including the outputs that heads after the first one read before
        the first computed position."""
        super().admit(slot, end_token_ids)
        if len(self._heads) > 1:
            self._outputs[:, slot].zero_()

    def follow(self, batch: Batch, hidden: torch.Tensor, accepted: AcceptedTokens | None) -> None:
        """Computes the heads for the rows of a sampled step; does not wait for the device.

        Args:
            batch: the step's batch.
            hidden: [T, hidden]: hidden states of all its tokens.
            accepted: its accepted tokens; None if there are no speculative rows.
        """
        replay = None
        if batch.size is not None:
            replay = self._follows.get((batch.size, batch.num_tokens))
        rows = batch if replay is not None else _unpadded(batch, self._tables)
        assert rows.staged is not None, "the rows are staged"
        slots, query_start = rows.staged["slots"], rows.staged["query_start"]
        latest = query_start[1:] - 1
        if accepted is not None and accepted.acceptance is not None:
            latest, slots = self._accepted_ends(accepted, slots, query_start)
        if replay is None:
            self._follow_rows(rows, hidden.to(self._outputs.dtype), latest, slots)
            return
        assert self._buffers is not None, "captured"
        self._buffers.latest[: len(latest)].copy_(latest)
        self._buffers.slots[: len(slots)].copy_(slots)
        replay()

    def draft(self, placement: DevicePlacement, windows: Sequence[DraftRow]) -> None:
        """Writes drafts to the token pool; arguments as in DeviceProposer."""
        num_passes = placement.longest - 1
        if num_passes:
            last = placement.firsts + placement.lengths - 1
            end = max(row.start + row.length for row in windows)
            slots = np.array([row.slot for row in windows], dtype=np.int64)
            size = self._captured_size(len(slots))
            if size is not None:
                self._replay(slots, size, placement.newest, last, num_passes)
                return
            rows = self._rows(slots, placement.newest, last, end)
            outputs: torch.Tensor | None = None
            for number in range(num_passes):
                outputs, _, _ = self._guess(rows, number, outputs)

    def propose(self, requests: Sequence[DraftRequest], threshold: float) -> list[Guesses]:
        """Guesses for each request, and the number that become drafts; waits for the device. On
        CPU, stops when no request's next guess is worth verifying."""
        table = np.array(requests, dtype=np.int64)
        slots, newest, most = np.ascontiguousarray(table[:, 0]), table[:, 1] - 1, table[:, 2]
        counts, device = most.tolist(), self._tables.device
        places = to_device(torch.from_numpy(np.stack((newest, newest + most))), device)
        rows = self._rows(slots, places[0], places[1], int((newest + most).max()) + 1)
        outputs: torch.Tensor | None = None
        found: list[Guesses] = [Guesses([], [], 0)] * len(requests)
        columns: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(max(counts)):
            ends = (newest + np.minimum(most, number)).tolist()
            outputs, logits, tokens = self._guess(rows, number, outputs, ends)
            columns.append((tokens, self._probabilities(rows, logits, tokens)))
            if device.type == "cpu" or number + 1 == max(counts):
                found = self._worthwhile(requests, columns, threshold)
            if device.type == "cpu" and all(guesses.num_drafts <= number for guesses in found):
                break
        return found

    def prepare_capture(self, largest: int) -> None:
        """Allocates the static buffers of graphs with up to `largest` rows that draft."""
        tables, device = self._tables, self._tables.device
        arrays = drafting_arrays(tables, np.zeros(0, dtype=np.int64), largest)
        self._buffers = _StaticBuffers(
            packed=torch.empty_like(stage(arrays, device).packed),
            starts=torch.zeros(largest, dtype=torch.int64, device=device),
            last=torch.zeros(largest, dtype=torch.int64, device=device),
            outputs=torch.zeros_like(self._outputs[:, :1]).repeat(1, largest, 1),
            latest=torch.zeros(self._outputs.shape[1], dtype=torch.int64, device=device),
            slots=torch.zeros(self._outputs.shape[1], dtype=torch.int64, device=device),
        )
        self.close()

    def capture_follow(self, batch: Batch, hidden: torch.Tensor, capture: Capture) -> None:
        """Captures `follow` for the steps of a graph.

        Args:
            batch: the graph's padded batch, whose arrays are static.
            hidden: [T, hidden]: its hidden states, in a static buffer.
            capture: captures launches.
        """
        assert self._buffers is not None, "prepare_capture comes first"
        assert batch.size is not None, "a graph has a size"
        count = len(batch.rows)
        latest, slots = self._buffers.latest[:count], self._buffers.slots[:count]
        assert batch.staged is not None, "graphs gather their inputs"
        latest.copy_(batch.staged["query_start"][1:] - 1)
        slots.fill_(self._tables.dummy_slot)
        self._follows[batch.size, batch.num_tokens] = capture(
            partial(self._follow_rows, batch, hidden, latest, slots)
        )

    def capture(self, size: int, capture: Capture) -> None:
        """Captures the passes of `size` rows that draft, on dummy rows."""
        tables, buffers = self._tables, self._buffers
        assert buffers is not None, "prepare_capture comes first"
        staged = stage(drafting_arrays(tables, np.zeros(0, dtype=np.int64), size), tables.device)
        buffers.packed[: len(staged.packed)].copy_(staged.packed)
        for buffer in (buffers.starts, buffers.last):
            buffer.fill_(1)  # a pass reads the position before
        for filters, number in itertools.product(((), FILTERS), range(len(self._heads) + 1)):
            rows = DraftingRows(
                staged=staged.at(buffers.packed),
                starts=buffers.starts[:size],
                last=buffers.last[:size],
                num_pages=-(-tables.max_positions // tables.page_size),
                size=size,
                filters=filters,
                max_top_k=tables.vocab_size,
            )
            launch = partial(self._guess_static, rows, buffers.outputs[:, :size], number)
            self._passes[size, bool(filters), number] = capture(launch)

    def close(self) -> None:
        """Drops all graphs."""
        self._follows.clear()
        self._passes.clear()

    def _captured_size(self, count: int) -> int | None:
        """Number of rows of the smallest graph for `count` rows that draft; None if there is
        none."""
        return min((size for size, _, _ in self._passes if size >= count), default=None)

    def _replay(
        self,
        slots: IntArray,
        size: int,
        newest: torch.Tensor,
        last: torch.Tensor,
        num_passes: int,
    ) -> None:
        """Drafts on graphs of `size` rows; other arguments as in `_rows`."""
        tables, buffers, count = self._tables, self._buffers, len(slots)
        assert buffers is not None, "captured"
        staged = stage(drafting_arrays(tables, slots, size), tables.device)
        buffers.packed[: len(staged.packed)].copy_(staged.packed)
        for buffer, values in ((buffers.starts, newest), (buffers.last, last)):
            buffer[:count].copy_(values)
            buffer[count:size].fill_(1)
        has_filters = bool(tables.sampling.filters(slots))
        for number in range(num_passes):
            self._passes[size, has_filters, min(number, len(self._heads))]()

    def _guess_static(self, rows: DraftingRows, outputs: torch.Tensor, number: int) -> None:
        """Runs `_guess` on static buffers; `outputs` is replaced in place."""
        now, _, _ = self._guess(rows, number, outputs)
        outputs.copy_(now)

    def _follow_rows(
        self, batch: Batch, hidden: torch.Tensor, latest: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Computes the heads for a batch's rows, and keeps the outputs of the tokens `latest` [R]
        by slot [R]."""
        step, states = self._gather(batch), self._inputs(hidden)
        for head, kept in zip(self._heads[:-1], self._outputs, strict=False):
            outputs = self._run(head, step, states)
            # At the position before a row's first token, the latest output of its slot.
            before = kept.index_select(0, step.slots)
            states = torch.where(_is_first(batch, step), before, outputs.roll(1, 0))
            kept.index_copy_(0, slots, outputs.index_select(0, latest))
        ends = self._run(self._heads[-1], step, states, latest)
        self._outputs[-1].index_copy_(0, slots, ends)

    def _inputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Inputs of the head [T, size] in a step whose final hidden states are `hidden`."""
        return hidden

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Looks up the embeddings [T, hidden] of token ids [T]."""
        return self._model.embed(token_ids)

    def _worthwhile(
        self,
        requests: Sequence[DraftRequest],
        columns: Sequence[tuple[torch.Tensor, torch.Tensor]],
        threshold: float,
    ) -> list[Guesses]:
        """Guesses from the passes so far, each of which has tokens and their probabilities [F];
        waits for the device. Guesses after the first one that is not worth verifying are omitted.
        """
        tokens = torch.stack([one for one, _ in columns], dim=1).tolist()
        probabilities = torch.stack([one for _, one in columns], dim=1).cpu().numpy()
        # Bounds descend, so the level is the number of bounds above the probability.
        levels = (probabilities[:, :, None] < LEAST_PROBABILITIES[:-1]).sum(-1).tolist()
        found: list[Guesses] = []
        for request, ids, own in zip(requests, tokens, levels, strict=True):
            count = request.num_drafts
            num_worth = self.calibration.num_worth(request.slot, own[:count], threshold)
            kept = min(count, num_worth + 1)
            found.append(Guesses(ids[:kept], own[:kept], num_worth))
        return found

    def _probabilities(
        self, rows: DraftingRows, logits: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Probabilities [F] of sampled tokens [F] at the rows' temperatures, or at 1 for greedy
        rows."""
        temperature = rows.staged["temperature"]
        scale = torch.where(temperature < GREEDY_BELOW, 1.0, temperature).unsqueeze(1)
        shares = (logits / scale).softmax(-1)
        return shares.gather(1, tokens.unsqueeze(1)).squeeze(1)

    def _rows(
        self, slots: IntArray, newest: torch.Tensor, last: torch.Tensor, end: int
    ) -> DraftingRows:
        """Rows of `slots` [F] that draft after positions `newest` [F] up to `last` [F], all before
        position `end`."""
        tables = self._tables
        sampling = tables.sampling
        return DraftingRows(
            staged=stage(drafting_arrays(tables, slots, len(slots)), tables.device),
            starts=newest.clone(),
            last=last,
            num_pages=-(-end // tables.page_size),
            size=None,
            filters=sampling.filters(slots),
            max_top_k=int(sampling.top_k[slots].max()),
        )

    def _guess(
        self,
        rows: DraftingRows,
        number: int,
        outputs: torch.Tensor | None,
        ends: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Drafts one token after the latest token of each row, and advances the rows to it.

        Args:
            number: number of the pass; pass 0 starts from the outputs that `follow` has kept.
            outputs: [heads, F, hidden]: outputs of the previous pass; unused in pass 0.
            ends: [F]: positions of the latest tokens, if the host knows them.

        Returns:
            Outputs [heads, F, hidden] and logits [F, vocab] of this pass, and its tokens [F].
        """
        tables, drafting = self._tables, min(number, len(self._heads) - 1)
        if number == 0:
            outputs = self._outputs.index_select(1, rows.staged["slots"])
        else:
            assert outputs is not None, "only the first pass starts from nothing"
            # The latest draft is the next token of the position before it.
            step = self._gather(decode_batch(rows, rows.starts - 1, tables, ends))
            outputs = self._advance(step, number, outputs)
        head = self._heads[drafting]
        logits = head.compute_logits(outputs[drafting], self._model.compute_logits)
        positions = rows.starts + 1
        parameters = staged_parameters(rows.staged, positions, rows.filters, rows.max_top_k)
        tokens = sample_logits(logits, parameters, native=tables.native_sampling)
        tables.flat_tokens.index_copy_(0, rows.cells(positions, tables), tokens.int())
        rows.advance(positions)
        return outputs, logits, tokens

    def _advance(self, step: _Step, number: int, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs [heads, F, hidden] of pass `number` >= 1, given the outputs of the previous pass.
        Computes the head that drafts and the heads after it, whose caches later passes read. After
        its first draft, the last head continues from its own outputs."""
        last, found = len(self._heads) - 1, list(outputs)
        if number > last:
            found[last] = self._run(self._heads[last], step, outputs[last])
        for index in range(number, last + 1):
            found[index] = self._run(self._heads[index], step, outputs[index - 1])
        return torch.stack(found)

    def _gather(self, batch: Batch) -> _Step:
        """Inputs of the heads for a batch's rows. Next tokens are read from the token pool."""
        tables = self._tables
        inputs = gather_inputs(batch, tables, self._caches, self._groups, self._backend)
        assert batch.staged is not None, "gather_inputs reads the arrays"
        slots = _by_token(batch.staged["slots"], batch, len(inputs.positions))
        cells = slots * tables.token_stride + inputs.positions + 1
        embedded = self._embed(tables.flat_tokens.index_select(0, cells))
        return _Step(embedded, inputs.positions, inputs.context, slots)

    def _run(
        self,
        head: DraftingHead,
        step: _Step,
        states: torch.Tensor,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs of a head for states [T, size]: [T, hidden], or [S, hidden] of
        `logits_indices`."""
        return head.forward(step.embedded, states, step.positions, step.context, logits_indices)

    def _accepted_ends(
        self, accepted: AcceptedTokens, slots: torch.Tensor, query_start: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index [R], among the step's tokens, of the position before each row's newest token, and
        the slots [R]: the dummy slot for a row with no accepted tokens."""
        acceptance = accepted.acceptance
        assert acceptance is not None, "there must be speculative rows"
        device = slots.device
        numbers = [n for n, row in enumerate(accepted.rows) if isinstance(row, DraftRow)]
        rows = to_device(torch.tensor(numbers), device)
        counts, offsets = (
            one if isinstance(one, torch.Tensor) else to_device(torch.from_numpy(one), device)
            for one in (acceptance.counts, acceptance.offsets)
        )
        latest = query_start[1:] - 1
        ends = query_start[rows] + offsets + counts - 1
        is_new = counts > 0
        own = slots[rows]
        return (
            latest.index_copy(0, rows, torch.where(is_new, ends, latest[rows])),
            slots.index_copy(0, rows, torch.where(is_new, own, self._tables.dummy_slot)),
        )


class _Step(NamedTuple):
    """Inputs of the heads for the T tokens of a batch."""

    embedded: torch.Tensor
    """[T, hidden]: embeddings of the next tokens."""
    positions: torch.Tensor
    """[T] int64: positions of the tokens."""
    context: ForwardContext
    slots: torch.Tensor
    """[T] int64: slot of each token's row."""


class _StaticBuffers(NamedTuple):
    """Buffers at fixed addresses, for F rows that draft and for the R rows of a step."""

    packed: torch.Tensor
    """Arrays of the rows that draft (`drafting_arrays`)."""
    starts: torch.Tensor
    """[F] int64, as in DraftingRows."""
    last: torch.Tensor
    """[F] int64, as in DraftingRows."""
    outputs: torch.Tensor
    """[heads, F, hidden]: outputs of the latest pass."""
    latest: torch.Tensor
    """[R] int64: index of the position before each row's newest token."""
    slots: torch.Tensor
    """[R] int64: slots of the rows."""


def _by_token(values: torch.Tensor, batch: Batch, num_tokens: int) -> torch.Tensor:
    """Values of a batch's rows [R], repeated for their tokens [T]."""
    assert batch.staged is not None, "the rows are staged"
    return values.repeat_interleave(batch.staged["query_start"].diff(), output_size=num_tokens)


def _is_first(batch: Batch, step: _Step) -> torch.Tensor:
    """Whether tokens are the first ones of their rows, [T, 1]."""
    assert batch.starts is not None, "the rows are staged"
    starts = _by_token(batch.starts, batch, len(step.positions))
    return (step.positions == starts).unsqueeze(1)


def _unpadded(batch: Batch, tables: DeviceTables) -> Batch:
    """The rows of a batch, without padding and with their arrays, for an eager pass over them."""
    if batch.size is None and batch.staged is not None:
        return batch
    table = batch.rows[: batch.num_rows]
    slots, starts, lengths = (np.ascontiguousarray(column) for column in table.T[:3])
    query_start = np.append(0, np.cumsum(lengths))
    arrays = {"slots": slots, "starts": starts, "query_start": query_start}
    staged = stage(arrays, tables.device)
    return replace(
        batch,
        rows=table,
        num_decodes=count_decodes(lengths),
        ends=batch.ends[: batch.num_rows],
        staged=staged,
        starts=staged["starts"] if batch.starts is None else batch.starts[: batch.num_rows],
        size=None,
        num_tokens=0,
        logits_indices=None,
    )
