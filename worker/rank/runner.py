"""Executes Plans on one rank: tables, forward, sampling."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from kernels.attention import create_attention_library
from worker.config import EngineConfig
from worker.models.config import ModelConfig, load_model_config
from worker.models.context import KVCache
from worker.models.linear import LayerOptions
from worker.models.loader import build_model, draw_weights, load_weights
from worker.models.tensor_parallel import TensorParallelGroup
from worker.plan.messages import Hello
from worker.plan.plan import Plan, RankTimes, StepResult
from worker.rank.cpu import native_options, tune_cpu_process
from worker.rank.device import resolve_dtype
from worker.rank.device_clock import DeviceClock
from worker.rank.device_inputs import prepare_on_device
from worker.rank.diffusion.checks import check_blocks
from worker.rank.diffusion.decoder import BlockDecoder
from worker.rank.graphs import BlockGraphs, DecodeGraphs, create_capture
from worker.rank.host_pages import HostPages, create_host_pages
from worker.rank.inputs import StepInputs, build_inputs, build_native_inputs
from worker.rank.kv_cache import allocate_kv_caches, page_bytes
from worker.rank.launched import BegunStep, LaunchedStep, fetch_draws
from worker.rank.memory import plan_host_pages, plan_pages
from worker.rank.profiling import profile_plans
from worker.rank.sampling.draws import Draws, sample_with_rules
from worker.rank.sampling.logprobs import score_prompts
from worker.rank.sampling.masks import MaskRows
from worker.rank.sampling.sampler import sample
from worker.rank.speculation.drafting import DraftedStep, Drafter
from worker.rank.speculation.factory import create_drafter
from worker.rank.speculation.placement import Placement
from worker.rank.speculation.waves import draw_in_waves
from worker.rank.static_blocks import StaticBlocks
from worker.rank.static_step import StaticInputs, StaticStep
from worker.rank.streams import DeviceStreams, StepSlot
from worker.rank.tables import DeviceTables
from worker.rank.transfer import uploader_to

logger = logging.getLogger(__name__)


class ModelRunner:
    """One rank's model, KV cache and tables.

    Life: construct (loads the weights), `hello`, `allocate`, then for each Plan `begin` and
    `conclude`, which do not wait for a CUDA device, and the result of what this returns. All ranks
    of the group execute the same Plans in the same order and draw the same tokens.

    Raises:
        ValueError: the checkpoint cannot be served with this configuration.
    """

    def __init__(
        self, config: EngineConfig, group: TensorParallelGroup, model: ModelConfig | None = None
    ) -> None:
        self.config = config
        self.group = group
        self.device = group.device
        is_dummy = config.load_format == "dummy"
        self.model_config = model or load_model_config(config.checkpoint, weights=not is_dummy)
        if self.device.type == "cpu":
            tune_cpu_process(config.cpu_threads, group.world_size)
        self.max_model_len = self.model_config.resolve_max_model_len(config.max_model_len)
        self.dtype = resolve_dtype(config, self.device)
        self._attention = create_attention_library(
            config.attention_backend,
            device=self.device,
            dtype=self.dtype,
            page_size=config.page_size,
            batch_invariant=config.batch_invariant,
        )
        check_blocks(config, self.model_config, self._attention)
        options = LayerOptions(
            group=group,
            dtype=self.dtype,
            device=self.device,
            batch_invariant=config.batch_invariant,
        )
        self.model = build_model(self.model_config, options, self.max_model_len)
        native = native_options(config, self.device, group.world_size)
        if is_dummy:
            draw_weights(self.model, native)
        else:
            load_weights(
                self.model, self.model_config, show_progress=group.rank == 0, native=native
            )
        self._tables: DeviceTables
        self._kv_caches: tuple[KVCache, ...] = ()
        self._streams = DeviceStreams(self.device) if self.device.type == "cuda" else None
        self._clock = DeviceClock()
        # A library plans each step on the host.
        streams = None if self._attention is not None else self._streams
        self._capture = create_capture(config, group, streams, self.model_config.block_size)
        self._graphs: DecodeGraphs | BlockGraphs | None = None
        self._drafter: Drafter | None = None
        self._blocks: BlockDecoder | None = None
        self._host_pages: HostPages | None = None

    def hello(self) -> Hello:
        """What this rank loaded and how many KV pages it has room for."""
        num_pages = plan_pages(
            self.config,
            group=self.group,
            page_bytes=page_bytes(self.config, self.model_config, self.group, self.dtype),
            max_model_len=self.max_model_len,
            profile=self._profile,
            graphs=self._measure_graphs,
        )
        return Hello(
            rank=self.group.rank,
            num_pages=num_pages,
            max_model_len=self.max_model_len,
            vocab_size=self.model_config.vocab_size,
            num_host_pages=plan_host_pages(self.config, self.model_config, self.group, self.dtype),
        )

    def allocate(self, num_pages: int, num_host_pages: int = 0) -> None:
        """Makes the KV cache of `num_pages` pages (page 0 is the dummy page) and the tables.

        On CUDA, captures the graphs of decode steps: every rank must be at it, since they capture
        collectives.
        """
        assert num_pages >= 2, "a cache has one page besides the dummy page"
        with self._on_compute_stream():
            self._allocate(num_pages)
            self._host_pages = create_host_pages(num_host_pages, self._kv_caches, self._streams)
            self._drafter = create_drafter(self.config, self._tables, num_pages)
            if self._capture is not None:
                with torch.inference_mode():
                    self._graphs = self._capture.run(self._static_step)

    def execute(self, plan: Plan, masks: bytes = b"") -> StepResult:
        """Runs one step to its end; `masks` as in `conclude`."""
        return self.conclude(self.begin(plan), masks).result()

    @torch.inference_mode()
    def begin(self, plan: Plan) -> BegunStep:
        """The step as far as it goes without masks: up to its forward pass, launched."""
        started = time.monotonic()
        loads = None if self._host_pages is None else self._host_pages.copy(plan)
        copied = time.monotonic()
        with self._on_compute_stream():
            slot = None if self._streams is None else self._streams.take()
            if slot is not None:
                slot.started.record()
            blocks = None
            if self._blocks is not None:
                blocks = self._blocks.begin(plan)
                plan = blocks.plan
            drafted = None if self._drafter is None else self._drafter.resolve(plan)
            inputs, static = self._prepare(plan, drafted, slot)
            prepared = time.monotonic()
            if slot is not None:
                slot.prepared.record()
            hidden = self._run(inputs, static, None if blocks is None else blocks.read)
            if slot is not None:
                slot.forwarded.record()
        return BegunStep(
            plan=plan,
            inputs=inputs,
            static=static,
            hidden=hidden,
            drafted=drafted,
            blocks=blocks,
            times=(started, prepared, time.monotonic()),
            copy_s=copied - started,
            slot=slot,
            loads=loads,
        )

    @torch.inference_mode()
    def conclude(self, step: BegunStep, masks: bytes = b"") -> LaunchedStep:
        """Launches the draw, and sends its tokens to the host.

        Args:
            step: the one begun last.
            masks: one row of ceil(vocab / 32) int32 words for each draw of `Plan.masked`.
        """
        resumed = time.monotonic()
        slot, is_first = step.slot, self.group.rank == 0
        with self._on_compute_stream():
            draws = settled = blocks = None
            if self._blocks is not None and step.blocks is not None:
                blocks = self._blocks.run(step.blocks, step.hidden, masks)
            else:
                draws = self._draw(step, step.mask_rows(masks, self._tables))
            if self._drafter is not None:
                settled = self._drafter.settle(step.plan, step.drafted, draws)
            if slot is not None:
                slot.finish()
                draws = draws and fetch_draws(draws, slot, with_logprobs=is_first)
                settled = settled and settled.fetch(slot)
                slot.close()
        finished = time.monotonic()
        started, prepared, forwarded = step.times
        drawn_by_graph = step.static is not None and step.inputs is None
        return LaunchedStep(
            seq=step.plan.seq,
            draws=draws,
            samples=step.static.samples if step.static is not None and drawn_by_graph else None,
            settled=settled,
            times=RankTimes(started, prepared, forwarded, finished),
            compute_ms=(finished - resumed + forwarded - started - step.copy_s) * 1e3,
            slot=slot,
            clock=self._clock,
            wants_logprobs=is_first,
            blocks=blocks,
            loads=step.loads,
        )

    def prepare(
        self, plan: Plan, slot: StepSlot | None = None, placement: Placement | None = None
    ) -> StepInputs | None:
        """Applies the Plan's writes and stages its inputs; None for a Plan without rows."""
        if self._tables.prepares_on_device:
            return prepare_on_device(
                plan,
                self._tables,
                batch_invariant=self.config.batch_invariant,
                library=self._attention,
                uploader=slot,
                placement=placement,
            )
        assert placement is None, "the host must know where rows stand"
        self._tables.apply(plan)
        if not plan.rows:
            return None
        if self.model.native is not None:
            return build_native_inputs(plan, self._tables)
        return build_inputs(plan, self._tables, batch_invariant=self.config.batch_invariant)

    def draw(
        self,
        hidden: torch.Tensor,
        inputs: StepInputs,
        masks: MaskRows | None = None,
        drafted: DraftedStep | None = None,
    ) -> Draws | None:
        """Scoring and sampling, without waiting for the device; None where nothing comes of it."""
        rules = inputs.rules
        draws = None
        if inputs.num_samples:
            draws = self.sample(self.score(hidden, inputs), inputs, masks, drafted)
        if rules is None or not rules.prompts:
            return draws
        scores = score_prompts(
            rules.prompts, hidden, self._tables.flat_tokens, self.model.compute_logits
        )
        return replace(draws or Draws(tokens=None), prompt_scores=scores)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states of the step's tokens that are read, or of all."""
        tokens, read = inputs.forward, inputs.read_tokens
        if tokens is None:
            assert self.model.native is not None, "who else reads the tables"
            return self.model.native.forward(
                inputs.rows, self._tables.token_pool, self._tables.page_table, read
            )
        context = tokens.context(self._kv_caches, read)
        return self.model.forward(tokens.input_ids, tokens.positions, context)

    def score(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """Logits of the rows that sample, fp32 [S, vocab]."""
        if inputs.sample_tokens is not None and inputs.read_tokens is None:
            hidden = hidden.index_select(0, inputs.sample_tokens)
        return self.model.compute_logits(hidden)

    def sample(
        self,
        logits: torch.Tensor,
        inputs: StepInputs,
        masks: MaskRows | None = None,
        drafted: DraftedStep | None = None,
    ) -> Draws:
        """Draws [S] tokens and puts them where the next step looks for them."""
        tables, rules = self._tables, inputs.rules
        if rules is None:
            if masks is not None:
                masks.apply(logits, native=tables.native_draws)
            draws = Draws(tokens=sample(logits, inputs.random, native=tables.native_draws))
        elif drafted is not None and drafted.placement is None and rules.penalties is not None:
            draws = draw_in_waves(logits, drafted, tables, masks)
        else:
            draws = sample_with_rules(logits, inputs.random, rules, tables, masks)
        assert draws.tokens is not None
        tables.flat_tokens.index_copy_(0, inputs.destinations, draws.tokens.int())
        return draws

    def _prepare(
        self, plan: Plan, drafted: DraftedStep | None, slot: StepSlot | None
    ) -> tuple[StepInputs | None, StaticInputs | None]:
        if drafted is not None:
            plan = drafted.plan
            if drafted.placement is not None:
                return self.prepare(plan, slot, drafted.placement), None
        size = None if self._graphs is None else self._graphs.size_for(plan.rows)
        if size is None or self._graphs is None:
            return self.prepare(plan, slot), None
        uploader = slot or uploader_to(self.device)
        static, inputs = self._graphs.prepare(plan, self._tables, size, uploader)
        return inputs, static

    def _run(
        self, inputs: StepInputs | None, static: StaticInputs | None, read: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Hidden states of the tokens `read` of a step of blocks; else as the inputs say."""
        if static is not None and self._graphs is not None:
            hidden = self._graphs.forward(static)
        elif inputs is None:
            return None
        elif read is None or "skip_unread" in self.config.dllm_features:
            return self.forward(inputs if read is None else replace(inputs, read_tokens=read))
        else:
            hidden = self.forward(inputs)
        return hidden if read is None else hidden.index_select(0, read)

    def _draw(self, step: BegunStep, masks: MaskRows | None) -> Draws | None:
        if step.static is not None and step.inputs is None:
            assert isinstance(self._graphs, DecodeGraphs), "who else draws from static buffers"
            if self._streams is not None:
                # HAZARD(stream): the tokens of the step before leave from the same buffer.
                self._streams.await_fetches()
            return Draws(tokens=self._graphs.sample(step.static, masks))
        if step.inputs is None or step.hidden is None:
            return None
        return self.draw(step.hidden, step.inputs, masks, step.drafted)

    def _forward_plan(self, plan: Plan, read: torch.Tensor) -> torch.Tensor:
        hidden = self._run(*self._prepare(plan, None, None), read)
        assert hidden is not None, "a round has rows"
        return hidden

    def _on_compute_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._streams is None else torch.cuda.stream(self._streams.compute)

    def _allocate(self, num_pages: int) -> None:
        self._kv_caches = allocate_kv_caches(
            num_pages, self.config.page_size, self.model_config, self.group, self.dtype
        )
        if self.model.native is not None:
            self.model.native.bind([(cache.k, cache.v) for cache in self._kv_caches])
        # A request can be no longer than the whole cache.
        self._tables = DeviceTables(
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=min(self.max_model_len, (num_pages - 1) * self.config.page_size),
            page_size=self.config.page_size,
            vocab_size=self.model_config.vocab_size,
            device=self.device,
            native_draws=self.model.native is not None,
            block_size=self.model_config.block_size,
        )
        if self.model_config.mask_token_id is not None:
            self._blocks = BlockDecoder(
                *(self.config, self.model_config, self._tables),
                forward=self._forward_plan,
                score=self.model.compute_logits,
            )

    def _static_step(self, max_rows: int) -> StaticStep | StaticBlocks:
        make = StaticStep if self.model_config.block_size == 1 else StaticBlocks
        return make(
            self.model,
            self._kv_caches,
            self._tables,
            max_rows=max_rows,
            batch_invariant=self.config.batch_invariant,
        )

    def _profile(self) -> None:
        """The largest prefill and the largest draw, on a cache whose every page is the dummy."""
        largest = profile_plans(
            self.config, max_model_len=self.max_model_len, block_size=self.model_config.block_size
        )
        with self._on_compute_stream():
            self._allocate(-(-largest.num_tokens // self.config.page_size) + 1)
        for plan in largest.plans:
            self.execute(plan)

    @torch.inference_mode()
    def _measure_graphs(self) -> int:
        """Bytes that graphs will take beside the cache; then lets go of what profiling took."""
        num_bytes = 0
        if self._capture is not None:
            with self._on_compute_stream():
                num_bytes = self._capture.measure(self._static_step)
        self._kv_caches = ()
        return num_bytes
