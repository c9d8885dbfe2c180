"""ServedModel: a model with its tokenizer, its workers, and the completions of its requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from router.channel import WorkerChannel, WorkerTransport
from router.config import ModelRoute
from router.errors import no_worker, unknown_model
from router.explain import DecisionLog
from router.fleet import Fleet, PromptBlocks, RejectedGrammars, SessionList
from router.metrics.stats import ModelStats, WorkerTarget
from router.metrics.tenants import TenantBook
from router.parsers import dialect_of
from router.serving.adapters import AdapterRegistry, CheckFolder
from router.serving.admission import AdmissionRules
from router.serving.completion import Completion, Mailbox
from router.serving.completion_times import CompletionSpec, CompletionTimes
from router.serving.entrance import SessionEntrance
from router.serving.generation import Generation, GenerationRequest
from router.serving.load import LoadMeter
from router.serving.placing import Placer
from router.serving.settings import SettingsStore
from router.tokens.encoder import PromptEncoder
from router.work_slice import WorkSlice
from worker.protocol.adapters import AdapterRef
from worker.protocol.admission import AdmissionChange
from worker.protocol.messages import AttachSnapshot, EngineInfo, WorkerUpdate
from worker.protocol.text.detokenizer import RequestText
from worker.protocol.text.stop import StopStrings
from worker.protocol.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class ServedModel:
    """Handles events of a model's worker channels and creates the completions of requests.

    Args:
        route: configuration of the model.
        gateway_id: id of this gateway.
        transport: connects to the model's workers.
        tokenizer: tokenizer of the model.
        encoder: encodes the prompts of requests.
        fleet: the model's workers.
        defaults: default sampling parameters (generation_config.json).
        max_tenants: maximum number of tenants, and of adapters, that metrics distinguish.
        settings: store shared by the model's gateways; None if this gateway is the only one.
        adapters: the model's LoRA adapters.
    """

    def __init__(
        self,
        route: ModelRoute,
        gateway_id: str,
        transport: WorkerTransport,
        tokenizer: Tokenizer,
        encoder: PromptEncoder,
        fleet: Fleet,
        defaults: dict[str, Any],
        *,
        max_tenants: int = 32,
        settings: SettingsStore | None = None,
        adapters: AdapterRegistry,
    ) -> None:
        self.route = route
        self.adapters = adapters
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.fleet = fleet
        self.defaults = defaults
        self.dialect = dialect_of(
            tokenizer, route.chat.tool_call_parser, route.chat.reasoning_parser
        )
        """The model's formats of reasoning and tool calls."""
        adapters_named = TenantBook(max_tenants) if route.enable_lora else None
        self.stats = ModelStats(TenantBook(max_tenants), adapters_named)
        self.set_target(WorkerTarget(route.min_workers, route.min_workers, route.max_workers))
        self._gateway_id = gateway_id
        self._transport = transport
        self._channels: dict[str, WorkerChannel] = {}
        self._closed = False
        self.admission = AdmissionRules(settings, self._notify_admission)
        self.rejected_grammars = RejectedGrammars()
        self.load = LoadMeter(self.stats, fleet, time.monotonic)
        self._log_file = _decision_log(route, gateway_id)
        self._placer = Placer(
            route, fleet, self._channels, self.stats, self.rejected_grammars, self._log_file
        )
        self.on_update: Callable[[str, WorkerUpdate], None] = fleet.update
        """Passes load and block events of a worker's step to the fleet, and its load to the session
        gate if there is one; see ChannelListener."""
        if self._placer.entrance is not None:
            self.on_update = partial(self._on_update, self._placer.entrance)

    @property
    def ready(self) -> bool:
        """Whether requests can be served: a worker is ready or is started on demand."""
        return self.fleet.ready or self.route.on_demand

    @property
    def num_open(self) -> int:
        """Number of completions that have not ended."""
        return self.stats.started - sum(self.stats.finished.values())

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids in requests must be below it."""
        info = self.fleet.info
        return info.vocab_size if info is not None else self.tokenizer.vocab_size

    def sessions(self, limit: int) -> SessionList | None:
        """Agent sessions of this gateway, at most `limit` of them listed; None if there is no
        session gate."""
        entrance = self._placer.entrance
        return None if entrance is None else entrance.listing(limit)

    async def start(self) -> None:
        """Connects to the workers, and tracks changes to their set."""
        await self.admission.start()
        await self.adapters.start()
        self._transport.watch_workers(self._set_workers)

    async def close(self) -> None:
        """Disconnects from all workers; open requests fail."""
        self._closed = True
        await self.admission.close()
        await self.adapters.close()
        self._placer.close()
        for channel in list(self._channels.values()):
            await channel.close()
        if self._log_file is not None:
            self._log_file.close(self.fleet)

    async def ready_info(self) -> EngineInfo:
        """EngineInfo of a ready worker; waits if a worker is expected. Raises ApiError (503)."""
        return await self._placer.ready_info()

    async def adapter(self, name: str) -> AdapterRef | None:
        """The current version of a LoRA adapter; None for an empty name.

        Waits for a worker if no worker has reported the version of a configured adapter yet.

        Raises:
            ApiError: 404 if the adapter has been unloaded; 503 if no worker is available.
        """
        if not name:
            return None
        if name in self.adapters and self.adapters.find(name) is None:
            await self._placer.wait_for_worker()
        ref = self.adapters.find(name)
        if ref is None:
            raise no_worker(self.route.name) if name in self.adapters else unknown_model(name)
        return ref

    def adapter_checks(self) -> list[CheckFolder]:
        """Functions that check an adapter's folder, one per ready worker."""
        return [
            channel.check_adapter
            for worker_id, channel in self._channels.items()
            if self.fleet.is_ready(worker_id)
        ]

    async def generation(self, request: GenerationRequest) -> Generation:
        """Creates a request's completions, which are not placed yet."""
        mailbox = Mailbox()
        sampling = request.feasibility.sampling
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        now = request.arrived_at
        if now is None:
            now = asyncio.get_running_loop().time()
        shared, stop = sampling.amended(n=1, seed=None), StopStrings(sampling.stop)
        others = shared
        if shared.prompt_logprobs is not None and not request.stream:
            # The first completion of each prompt returns them.
            others = shared.amended(prompt_logprobs=None)
        completions = []
        work = WorkSlice()
        unique = secrets.token_hex(8)  # clients choose request ids, and may reuse them
        contexts = [self._context(prompt, request) for prompt in request.prompts]
        pairs = itertools.product(request.prompts, range(sampling.n))
        for index, (prompt, choice) in enumerate(pairs):
            spec = CompletionSpec(
                request_id=f"{request.request_id}.{unique}.{index}",
                index=index,
                prompt=prompt,
                sampling=others if choice else shared,
                seed=_wrap(seed + choice),
                feasibility=request.feasibility,
                priority=request.priority,
                slo=request.slo,
                tenant=request.tenant,
                traceparent="" if request.span is None else request.span.traceparent,
                gateway_id=self._gateway_id,
            )
            context = contexts[index // sampling.n]
            completions.append(self._completion(spec, context, stop, mailbox, request, now))
            if work.is_over:
                await work.next()
        for prompt in request.prompts:
            prompt.priority = request.priority
            self.stats.prompt_tokens += prompt.num_tokens
            self.stats.prompt_length.observe(prompt.num_tokens)
        self.stats.started += len(completions)
        explain = self.route.routing.explain_routing
        return Generation(request, completions, mailbox, self._placer.place, explain=explain)

    def set_target(self, target: WorkerTarget) -> None:
        """Sets the target number of workers, for metrics."""
        self.stats.workers = target

    # Methods of ChannelListener.

    def on_snapshot(self, worker_id: str, snapshot: AttachSnapshot) -> None:
        """Handles the snapshot of a worker that has attached; see ChannelListener."""
        self.fleet.attach(worker_id, snapshot)
        if snapshot.info is not None:
            self.adapters.reported(snapshot.info.adapters)
        self.rejected_grammars.clear()
        # The worker may have left before the fleet registered it, while the stream was being
        # opened.
        self.fleet.set_draining(worker_id, self._channels[worker_id].leaving)
        if self.admission.change.given:
            self._channels[worker_id].set_admission(self.admission.change)
        if self._log_file is not None:
            self._log_file.worker(self.fleet.worker(worker_id))
        state = "loading" if snapshot.info is None else "ready"
        self._log("worker %s attached, epoch %d, %s", worker_id, snapshot.epoch, state)
        if (entrance := self._placer.entrance) is not None:
            entrance.attached(worker_id, snapshot.load)
        self._placer.attached(worker_id)

    def on_accepted(self, worker_id: str, request_id: str, epoch: int, ordinal: int) -> None:
        """Records that a worker has accepted a request as submit number `ordinal` of `epoch`."""
        self.fleet.accepted(worker_id, request_id, epoch, ordinal)

    def on_lost(self, worker_id: str, reason: str) -> None:
        """Handles the failure of a worker or its rank group."""
        self.fleet.lose(worker_id)
        self._placer.lose_sessions(worker_id)
        self._log("worker %s lost: %s", worker_id, reason)

    def on_closed(self, worker_id: str) -> None:
        """Removes a worker whose channel has ended."""
        self.fleet.remove(worker_id)
        self._placer.lose_sessions(worker_id)
        self._channels.pop(worker_id, None)
        self._placer.forget(worker_id)
        self.stats.routed.pop(worker_id, None)

    def _on_update(self, entrance: SessionEntrance, worker_id: str, update: WorkerUpdate) -> None:
        self.fleet.update(worker_id, update)
        if update.load is not None:
            entrance.reported(worker_id, update.load)

    def _set_workers(self, worker_ids: Iterable[str]) -> None:
        if self._closed:
            return
        members = dict.fromkeys(worker_ids)
        if not members and self._channels:
            self._placer.all_left()
        for worker_id in members:
            if worker_id not in self._channels:
                channel = WorkerChannel(worker_id, self._gateway_id, self._transport, self)
                self._channels[worker_id] = channel
                self._placer.expect(worker_id)
                channel.start()
        for worker_id, channel in self._channels.items():
            channel.leaving = worker_id not in members
            self.fleet.set_draining(worker_id, channel.leaving)
            if channel.leaving:
                self._placer.resolved(worker_id)

    def _notify_admission(self, change: AdmissionChange) -> list[str]:
        """Sends a change to admission rules to all attached workers; returns their ids."""
        return [
            worker_id
            for worker_id, channel in self._channels.items()
            if channel.set_admission(change)
        ]

    def _context(self, prompt: PromptBlocks, request: GenerationRequest) -> Sequence[int]:
        """Last tokens of a prompt, used as context to detokenize its completions."""
        return self.tokenizer.context(
            memoryview(prompt.token_ids).cast("i"),
            skip_special_tokens=request.feasibility.sampling.skip_special_tokens,
            shown=request.shown_tokens,
        )

    def _completion(
        self,
        spec: CompletionSpec,
        context: Sequence[int],
        stop: StopStrings,
        mailbox: Mailbox,
        request: GenerationRequest,
        now: float,
    ) -> Completion:
        sampling = spec.sampling
        text = RequestText(
            self.tokenizer.detokenizer(
                context=context,
                skip_special_tokens=sampling.skip_special_tokens,
                shown=request.shown_tokens,
            ),
            stop=stop,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            with_offsets=request.with_offsets,
        )
        return Completion(
            spec,
            text=text,
            mailbox=mailbox,
            stream=request.stream,
            times=CompletionTimes(spec, self.stats, now),
            owner=self._placer,
        )

    def _log(self, message: str, *values: object) -> None:
        logger.info(message, *values, extra={"model": self.route.name})


def _decision_log(route: ModelRoute, gateway_id: str) -> DecisionLog | None:
    options = route.routing.decision_log
    if options is None:
        return None
    return DecisionLog(
        options.folder,
        route.name,
        gateway_id,
        max_bytes=options.max_mib << 20,
        key_file=options.key_file,
    )


def _wrap(seed: int) -> int:
    """Wraps a later choice's seed, which may be 2⁶⁴ or more, into the range of 64-bit seeds."""
    return seed if seed < 2**64 else seed - 2**64
