"""Model runner: executes Plans on one rank, with tables, forward passes and sampling."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from kernels import registry
from kernels.lora import LoraTiles
from kernels.mla_prefill.base import MIN_QUERIES
from worker.config import EngineConfig
from worker.models.config.model_config import ModelConfig
from worker.models.layers.context import KVCache
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.plan.messages import Hello
from worker.plan.plan import Plan, RankTimes, StepResult
from worker.rank.adapter_rows import logits_tiles, row_tiles
from worker.rank.batch import Batch, BatchBuilder, gather_inputs
from worker.rank.canvas_graphs import CanvasGraphs, create_canvas_capture
from worker.rank.device_clock import DeviceClock
from worker.rank.diffusion.ahead import RoundAhead
from worker.rank.diffusion.canvas import CanvasDecoder, CanvasStep
from worker.rank.diffusion.decoder import BlockDecoder, BlockStep
from worker.rank.graphs import StepGraphs, create_capture
from worker.rank.host_pages import HostPages, create_host_pages
from worker.rank.kv_cache import allocate_planes, kv_caches, page_bytes, page_groups
from worker.rank.loaded_model import load_model
from worker.rank.memory import plan_host_pages, plan_pages, slot_bytes
from worker.rank.pooling import Pooler
from worker.rank.profiling import profile_plans
from worker.rank.sampler import SamplerOutput, sample
from worker.rank.sampling.logprobs import score_prompts
from worker.rank.sampling.masks import MaskRows
from worker.rank.speculation.device_model import DeviceDraftModel, DeviceModelProposer
from worker.rank.speculation.draft_model import draft_page_bytes
from worker.rank.speculation.drafter import DraftedStep, Drafter
from worker.rank.speculation.factory import create_drafter, create_heads
from worker.rank.speculation.heads import HeadProposer
from worker.rank.speculation.native_heads import NativeHeadProposer
from worker.rank.states import RequestStates
from worker.rank.steps import ForwardStep, SampledStep, fetch_output
from worker.rank.streams import DeviceStreams, StepSlot
from worker.rank.tables import DeviceTables
from worker.rank.warmup import warm_up, warm_up_limits


class ModelRunner:
    """One rank's model, KV cache and tables.

    The constructor loads the weights. Then call `hello`, `allocate`, and, for each Plan, `forward`
    and `sample`. These two do not wait for a CUDA device; `result` of the step returned by `sample`
    does. All ranks of the group execute the same Plans in the same order, and sample the same
    tokens.

    Args:
        config: the engine's configuration.
        group: the rank's tensor-parallel group.
        model: the model's configuration; None reads it from the checkpoint.

    Raises:
        ValueError: the checkpoint cannot be served with this configuration.
    """

    def __init__(
        self, config: EngineConfig, group: TensorParallelGroup, model: ModelConfig | None = None
    ) -> None:
        self.group = group
        self.device = group.device
        loaded = load_model(config, group, model)
        config = self.config = loaded.config
        self.model_config, self.model = loaded.model_config, loaded.model
        self.dtype, self.cache_dtype = loaded.dtype, loaded.cache_dtype
        self.max_model_len = self.model_config.resolve_max_model_len(config.max_model_len)
        self._num_positions, self._num_replayed = loaded.num_positions, loaded.num_replayed
        self._layout, self._attention = loaded.layout, loaded.attention
        self._adapters = loaded.adapters
        self._eagle, self._head_attention = loaded.eagle, loaded.head_attention
        self._page_groups = page_groups(config, self._layout)
        self._draft_model: DeviceDraftModel | None = None
        if config.draft_checkpoint and self.device.type == "cuda":
            self._draft_model = DeviceDraftModel(config, self.device, self.max_model_len)
        self._drafts: DeviceModelProposer | None = None
        self._heads: HeadProposer | NativeHeadProposer | None = None
        self._tables: DeviceTables
        self._builder: BatchBuilder
        self._planes: list[torch.Tensor] = []
        self._kv_caches: Mapping[int, KVCache] = {}
        self._states: RequestStates | None = None
        self._streams = DeviceStreams(self.device) if self.device.type == "cuda" else None
        self._clock = DeviceClock()
        self._capture = create_capture(
            *(config, group, self._streams, self._attention, self.model_config),
            self._head_attention if self._draft_model is None else self._draft_model.backend,
        )
        self._graphs: StepGraphs | None = None
        self._canvas_capture = create_canvas_capture(
            *(config, group, self._streams, self._attention, self.model_config, self.dtype)
        )
        self._canvas_graphs: CanvasGraphs | None = None
        self._drafter: Drafter | None = None
        self._blocks: BlockDecoder | CanvasDecoder | None = None
        self._pooler: Pooler | None = None
        self._host_pages: HostPages | None = None

    def hello(self) -> Hello:
        """The rank's Hello: the model's sizes, and the number of KV pages that fit in memory."""
        num_pages = plan_pages(
            self.config,
            group=self.group,
            page_bytes=page_bytes(
                *(self.config, self._layout, self._page_groups, self._draft_page_bytes())
            ),
            page_groups=self._page_groups,
            state_bytes=slot_bytes(
                *(self.config, self.model_config, self._layout, self.dtype),
                num_replayed=self._num_replayed,
                adapter_bytes=0 if self._adapters is None else self._adapters.num_bytes,
            ),
            max_model_len=self._num_positions,
            profile=self._profile,
            graphs=self._measure_graphs,
        )
        pooling, num_host_pages = self.model_config.pooling, 0
        if pooling is None or pooling.info.reuses_prefixes:
            num_host_pages = plan_host_pages(
                self.config,
                group=self.group,
                page_bytes=page_bytes(self.config, self._layout, self._page_groups),
                num_pages=num_pages,
            )
        return Hello(
            rank=self.group.rank,
            num_pages=num_pages,
            max_model_len=self.max_model_len,
            vocab_size=self.model_config.vocab_size,
            num_host_pages=num_host_pages,
            page_groups=self._page_groups,
            max_num_seqs=self.config.scheduling.max_num_seqs,
            max_num_batched_tokens=self.config.scheduling.max_num_batched_tokens,
        )

    def allocate(self, num_pages: int, num_host_pages: int = 0) -> None:
        """Allocates the KV cache of `num_pages` pages (page 0 is the dummy page), host pages and
        tables.

        On CUDA, also compiles all kernels and captures the graphs of small steps. Compilation and
        capture run collectives, so every rank must call this.
        """
        assert num_pages >= 2, "a cache needs a page besides the dummy page"
        config = self.config
        with self._on_compute_stream():
            self._allocate(num_pages)
            self._host_pages = create_host_pages(
                *(num_host_pages, self._planes, self._streams),
                must_pin=config.cache.host_cache_gib is not None,
            )
            if self._host_pages is not None and self._states is not None:
                num_snapshots = self._page_groups.num_snapshots(num_host_pages)
                self._host_pages.add_states(self._states, num_snapshots)
            self._drafter = create_drafter(
                *(self.config, self._tables, self._attention, num_pages),
                self._heads or self._drafts,
            )
        if self.device.type == "cuda" and registry.uses_triton(self.device):
            self._warm_up()  # not on CPU: the interpreter compiles nothing
        if self._capture is not None:
            with self._on_compute_stream(), torch.inference_mode():
                self._graphs = self._capture.run(
                    self.run_model, self.compute_logits, self._tables, self._captured_drafts
                )
        if self._canvas_capture is not None:
            with self._on_compute_stream(), torch.inference_mode():
                self._canvas_graphs = self._canvas_capture.run(self.run_model, self._tables)
        if self._host_pages is not None:
            self._host_pages.start()

    def execute(self, plan: Plan, masks: bytes = b"") -> StepResult:
        """Runs one step and waits for its result; `masks` as in `sample`."""
        return self.sample(self.forward(plan), masks).result()

    @torch.inference_mode()
    def forward(self, plan: Plan) -> ForwardStep:
        """Launches a step up to its forward pass, which needs no masks."""
        # Host memory: pages are copied to and from it before the step's rows use them.
        started = time.monotonic()
        if self._host_pages is not None:
            self._host_pages.copy(plan)
        copied = time.monotonic()
        with self._on_compute_stream():
            slot = None if self._streams is None else self._streams.take()
            if slot is not None:
                slot.started.record()
            # Rows: the rank sets the positions of running blocks and speculative rows.
            blocks = None
            if self._blocks is not None:
                blocks = self._blocks.prepare(plan)
                plan = blocks.plan
            if self._states is not None:
                self._states.prepare(plan)
            if self._adapters is not None:
                self._adapters.apply(plan)
            drafted = None if self._drafter is None else self._drafter.place(plan)
            # Inputs: tables are updated, arrays sent to the device.
            num_canvases = 0  # of a step without other rows
            if isinstance(blocks, CanvasStep) and len(blocks.canvases) == len(plan.rows):
                num_canvases = len(plan.rows)
            batch = self._build(plan, drafted, slot, num_canvases)
            pooled = None
            if self._pooler is not None:
                pooled = self._pooler.prepare(plan)
                batch = batch and self._pooler.select(batch, pooled)
            prepared = time.monotonic()
            if slot is not None:
                slot.prepared.record()
            # Forward pass: on a graph if one fits.
            hidden = None
            if batch is not None:
                hidden = self._run_blocks(batch, blocks)
            if slot is not None:
                slot.forwarded.record()
        return ForwardStep(
            plan=plan,
            batch=batch,
            hidden=hidden,
            drafted=drafted,
            blocks=blocks,
            pooled=pooled,
            times=(started, prepared, time.monotonic()),
            copy_s=copied - started,
            slot=slot,
        )

    @torch.inference_mode()
    def sample(self, step: ForwardStep, masks: bytes = b"") -> SampledStep:
        """Launches a step's sampling and the copy of its tokens to the host.

        Args:
            step: the step that `forward` returned last.
            masks: bitmasks for the rows in `Plan.masked`, as in a Sample message.
        """
        resumed = time.monotonic()
        slot, is_first = step.slot, self.group.rank == 0
        with self._on_compute_stream():
            # Sampling: rounds of running blocks, or tokens.
            output = accepted = blocks = pooled = None
            if self._pooler is not None:
                if step.hidden is not None and step.pooled is not None:
                    pooled = self._pooler.pool(step.hidden, step.pooled)
            elif isinstance(step.blocks, BlockStep):
                assert isinstance(self._blocks, BlockDecoder), "a step of a model with blocks"
                blocks = self._blocks.run(step.blocks, step.hidden, masks)
            elif isinstance(step.blocks, CanvasStep):
                assert isinstance(self._blocks, CanvasDecoder), "a step of a model with canvases"
                blocks = self._blocks.run(step.blocks, step.hidden, masks)
            elif step.batch is not None and step.hidden is not None:
                mask_rows = step.mask_rows(masks, self._tables) if step.plan.masked else None
                output = self.sample_batch(step.hidden, step.batch, mask_rows)
            # Drafts: those that match the sampled tokens are accepted.
            if self._drafter is not None and step.drafted is not None:
                accepted = self._drafter.observe(step.drafted, output)
            if self._heads is not None and step.batch is not None and step.hidden is not None:
                self._heads.follow(step.batch, step.hidden, accepted)
            # Fetch: copies to the host are launched but not awaited.
            if slot is not None:
                slot.finish()
                output = output and fetch_output(output, slot, with_logprobs=is_first)
                accepted = accepted and accepted.fetch(slot)
                if pooled is not None:
                    pooled = replace(pooled, vectors=slot.fetch(pooled.vectors))
                if isinstance(blocks, RoundAhead):
                    blocks.fetch(slot)
                slot.close()
        finished = time.monotonic()
        started, prepared, forwarded = step.times
        sampling = None if step.batch is None else step.batch.sampling
        return SampledStep(
            seq=step.plan.seq,
            output=output,
            sampled_rows=None if sampling is None else sampling.sampled_rows,
            accepted=accepted,
            times=RankTimes(started, prepared, forwarded, finished),
            compute_ms=(finished - resumed + forwarded - started - step.copy_s) * 1e3,
            slot=slot,
            clock=self._clock,
            reports_logprobs=is_first,
            blocks=blocks,
            pooled=pooled if is_first else None,
            host_pages=self._host_pages,
            adapters=self._adapters,
        )

    def close(self) -> None:
        """Drops all graphs, even if stack frames of a failed step still reference the runner."""
        if self._adapters is not None:
            self._adapters.close()
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None
        if self._canvas_graphs is not None:
            self._canvas_graphs.close()
            self._canvas_graphs = None

    def run_model(self, batch: Batch) -> torch.Tensor:
        """Hidden states [S, hidden] of `batch.logits_indices`, or [T, hidden] of all tokens."""
        tables, adapters, indices = self._tables, batch.adapters, batch.logits_indices
        if self.model.encoder is not None:
            types = None if self._pooler is None else self._pooler.token_types(batch.rows)
            return self.model.encoder.forward(batch.rows, tables.token_pool, types, indices)
        if batch.staged is None:
            assert self.model.native is not None, "only the compiled library needs no arrays"
            return self.model.native.forward(
                *(batch.rows, tables.token_pool, tables.page_table, indices),
                adapters=None if adapters is None else adapters.on_host(indices),
            )
        states = self._states
        inputs = gather_inputs(
            *(batch, self._tables, self._kv_caches, self._layout.groups, self._attention),
            states=None if states is None else states.caches,
            state_rows=None if states is None else states.rows(batch, self._tables.max_model_len),
            with_lengths=self.model_config.is_bidirectional,
        )
        context = inputs.context
        if self._pooler is not None and self.model_config.is_bidirectional:
            context = replace(context, token_types=self._pooler.token_types(batch.rows))
        with nullcontext() if self._adapters is None else self._adapters.of(batch):
            hidden = self.model.forward(inputs.input_ids, inputs.positions, context)
        if self._drafts is not None:
            self._drafts.follow(batch)
        return hidden

    def compute_logits(self, hidden: torch.Tensor, tiles: LoraTiles | None = None) -> torch.Tensor:
        """Computes fp32 logits [R, vocab_size] from hidden states of rows [R, hidden]; `tiles` has
        the rows by LoRA adapter, and is None if no row has one."""
        if self._adapters is None:
            return self.model.compute_logits(hidden)
        with self._adapters.of_logits(tiles, len(hidden)):
            return self.model.compute_logits(hidden)

    def sample_batch(
        self,
        hidden: torch.Tensor,
        batch: Batch,
        masks: MaskRows | None = None,
    ) -> SamplerOutput | None:
        """Samples the batch's rows and scores its prompts, without waiting for the device; None if
        there is nothing to sample or score."""
        sampling = batch.sampling
        if sampling is not None and sampling.is_captured:
            assert self._graphs is not None, "captured sampling without graphs"
            if self._streams is not None:
                # HAZARD(stream): the previous step's tokens are fetched from the same buffer.
                self._streams.await_fetches()
            return SamplerOutput(tokens=self._graphs.sample(batch, masks))
        output = None
        if sampling is not None:
            sampled = hidden
            if sampling.tokens is not None and batch.logits_indices is None:
                sampled = hidden.index_select(0, sampling.tokens)
            adapters = batch.selected_adapters
            tiles = None if adapters is None else logits_tiles(adapters, self._tables)
            logits = self.compute_logits(sampled, tiles)
            output = sample(logits, sampling, self._tables, masks)
        if batch.prompts:
            scores = score_prompts(
                batch.prompts,
                hidden,
                self._tables.flat_tokens,
                lambda rows, index: self.compute_logits(
                    rows, row_tiles(batch.rows[index, 0], len(rows), self._tables)
                ),
            )
            output = replace(output or SamplerOutput(tokens=None), prompt_scores=scores)
        return output

    def _build(
        self,
        plan: Plan,
        drafted: DraftedStep | None,
        slot: StepSlot | None,
        num_canvases: int = 0,
    ) -> Batch | None:
        size, num_tokens, speculative = None, 0, None
        if num_canvases and self._canvas_graphs is not None:
            size = self._canvas_graphs.size_for(num_canvases)
            num_tokens = (size or 0) * self.model_config.num_ahead
        elif drafted is not None:
            plan, speculative = drafted.plan, drafted.speculative
        # Layers with states: rows that follow drafts run on graphs that replay the drafts.
        replays = None if self._states is None else self._states.replays
        drafts = None if replays is None else replays.next_rows(plan.rows)
        if drafted is None and drafts is None and self._graphs is not None:
            size = self._graphs.size_for(plan.rows)
        if self._graphs is not None and size is None:
            size, num_tokens = self._graphs.tokens_for(plan.rows) or (None, 0)
        batch = self._builder.build(
            plan,
            uploader=slot,
            size=size,
            num_tokens=num_tokens,
            speculative=speculative,
            drafts=drafts,
        )
        if batch is None or self._heads is None:
            return batch
        return replace(batch, logits_indices=None)  # the head reads the states of all tokens

    def _run(self, batch: Batch, logits_indices: torch.Tensor | None) -> torch.Tensor:
        """Hidden states of the tokens at `logits_indices` (block diffusion) or, if that is None, at
        `batch.logits_indices`; of all tokens if both are None."""
        if batch.size is not None:
            assert self._graphs is not None, "a padded batch without graphs"
            hidden = self._graphs.forward(batch)
        elif logits_indices is not None and self._skips_unread() and not batch.has_adapters:
            return self.run_model(replace(batch, logits_indices=logits_indices))
        else:
            hidden = self.run_model(batch)
        return hidden if logits_indices is None else hidden.index_select(0, logits_indices)

    def _run_blocks(self, batch: Batch, blocks: BlockStep | CanvasStep | None) -> torch.Tensor:
        """Hidden states that running blocks or canvases need; the result of `_run` if there are
        none."""
        if isinstance(blocks, BlockStep) and blocks.ahead is not None:
            blocks.ahead.place(batch)
        if isinstance(blocks, CanvasStep) and blocks.signal is not None:
            if blocks.logits_indices is None:
                return self._run_canvases(batch, blocks.signal)
            batch = replace(batch, signal=blocks.signal)
        return self._run(batch, None if blocks is None else blocks.logits_indices)

    def _skips_unread(self) -> bool:
        """Whether the last layer skips positions whose outputs are not read. It does not if experts
        are chosen per block, since the choice depends on all positions of the block."""
        moe = self.model_config.moe
        has_blocks = moe is not None and moe.block_capacity > 0
        return "skip_unread" in self.config.dllm.features and not has_blocks

    def _forward_plan(self, plan: Plan, logits_indices: torch.Tensor) -> torch.Tensor:
        batch = self._build(plan, None, None)
        assert batch is not None, "a round must have rows"
        return self._run(batch, logits_indices)

    def _forward_canvases(self, plan: Plan, signal: torch.Tensor) -> torch.Tensor:
        batch = self._build(plan, None, None, len(plan.rows))
        assert batch is not None, "a round must have rows"
        return self._run_canvases(batch, signal)

    def _run_canvases(self, batch: Batch, signal: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden] of canvases, given their signal [T, hidden]; runs on a graph if
        one fits."""
        if batch.size is None:
            return self.run_model(replace(batch, signal=signal))
        assert self._canvas_graphs is not None, "a padded batch without graphs"
        return self._canvas_graphs.forward(batch, signal)

    def _on_compute_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._streams is None else torch.cuda.stream(self._streams.compute)

    def _allocate(self, num_pages: int) -> None:
        config, page_groups = self.config, self._page_groups
        tensors = allocate_planes(num_pages, config.cache.page_size, self._layout, self.device)
        self._planes = [plane for planes in tensors for plane in planes]
        self._kv_caches = kv_caches(tensors, config.cache.page_size, self._layout)
        if self.model.native is not None:
            caches = list(self._kv_caches.values())[: len(self.model.layers)]
            self.model.native.bind([(cache.k, cache.v) for cache in caches])
        if self._layout.states:
            num_slots = config.scheduling.max_num_seqs + 1
            num_snapshots = page_groups.num_snapshots(num_pages - 1)
            self._states = RequestStates(
                *(self._layout, num_slots, num_snapshots, self.device),
                num_replayed=self._num_replayed,
            )
        # A request cannot be longer than the whole cache.
        most = page_groups.max_tokens(
            num_pages - 1, config.cache.page_size, config.scheduling.max_num_batched_tokens
        )
        self._tables = DeviceTables(
            max_num_seqs=config.scheduling.max_num_seqs,
            max_model_len=min(self._num_positions, most),
            page_size=config.cache.page_size,
            vocab_size=self.model_config.vocab_size,
            device=self.device,
            native_sampling=self.model.native is not None,
            block_size=self.model_config.block_size,
            page_factors=[group.layers_per_page for group in self._layout.groups],
            keeps_states=bool(self._layout.states),
            num_replayed=self._num_replayed,
            max_loras=0 if config.lora is None else config.lora.max_loras,
            adapts_logits=self._adapters is not None and self._adapters.changes_logits,
        )
        if self._draft_model is not None:
            self._drafts = DeviceModelProposer(
                self._draft_model, self._tables, num_pages, config.cache.page_size
            )
        if self.model_config.pooling is not None:
            num_slots = config.scheduling.max_num_seqs
            self._pooler = Pooler.of(self.model, self.model_config.pooling, num_slots)
        head = self.model.mtp or self._eagle
        if head is not None:
            self._heads = create_heads(
                *(config, self.model, head, self._tables),
                *(self._kv_caches, self._layout, self._head_attention),
            )
        is_native = self.model.native is not None or self.model.encoder is not None
        self._builder = BatchBuilder(self._tables, is_native=is_native)
        self._blocks = self._create_blocks()

    def _create_blocks(self) -> BlockDecoder | CanvasDecoder | None:
        """The decoder of a block-diffusion model; None for others."""
        if self.model_config.mask_token_id is not None:
            return BlockDecoder(
                *(self.config, self.model_config, self._tables),
                forward=self._forward_plan,
                score=self.model.compute_logits,
                max_graph_blocks=lambda: 0 if self._graphs is None else self._graphs.max_rows,
            )
        if self.model_config.canvas is not None:
            return CanvasDecoder(
                *(self.config, self.model_config, self._tables),
                dtype=self.dtype,
                forward=self._forward_canvases,
                score=self.model.compute_logits,
                embed=self.model.embed_shares,
            )
        return None

    @property
    def _captured_drafts(self) -> DeviceModelProposer | HeadProposer | None:
        """The proposer whose passes are captured in graphs; None if there is none."""
        return self._heads if isinstance(self._heads, HeadProposer) else self._drafts

    def _draft_page_bytes(self) -> int:
        if self._draft_model is not None:
            return self._draft_model.layout.page_bytes(self.config.cache.page_size)
        return draft_page_bytes(self.config)

    def _profile(self) -> None:
        """Runs the largest prefill and the largest sampling step, on a cache that uses only the
        dummy page."""
        is_expanded = self._layout.spec.expansion is not None
        largest = profile_plans(
            self.config,
            max_model_len=self.max_model_len,
            block_size=self.model_config.block_size,
            canvas_length=self.model_config.num_ahead,
            short_row=MIN_QUERIES - 1 if is_expanded else 0,
        )
        with self._on_compute_stream():
            num_blocks = -(-largest.num_tokens // self.config.cache.page_size)
            self._allocate(num_blocks * self._page_groups.num_groups + 1)
        for plan in largest.plans:
            self.execute(plan)

    def _warm_up(self) -> None:
        """Compiles the kernels of all kinds of steps by running them."""
        limits = warm_up_limits(
            self.config,
            max_model_len=self._tables.max_model_len,
            block_size=self.model_config.block_size,
            canvas_length=self.model_config.num_ahead,
            top_k=self._layout.spec.top_k,
        )
        vocab_size = self.model_config.vocab_size
        warm_up(self.execute, limits, vocab_size=vocab_size, show=self.group.rank == 0)
        if self._drafter is not None:
            self._drafter.forget()

    @torch.inference_mode()
    def _measure_graphs(self) -> int:
        """Bytes that CUDA graphs will take; frees the memory that `_profile` allocated."""
        num_bytes = 0
        if self._capture is not None:
            with self._on_compute_stream():
                num_bytes = self._capture.measure(
                    self.run_model, self.compute_logits, self._tables, self._captured_drafts
                )
        if self._canvas_capture is not None:
            with self._on_compute_stream():
                num_bytes += self._canvas_capture.measure(self.run_model, self._tables)
        self._planes, self._kv_caches, self._states = [], {}, None
        self._drafts = self._heads = None
        return num_bytes
