"""One served model: its tokenizer, its workers, and the way of a request to one of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from router.channel import Refused, WorkerChannel, WorkerTransport, WorkerUnreachable
from router.config import ModelRoute
from router.errors import ApiError, bad_request, no_worker, rejected
from router.explain import DecisionLog
from router.fleet import BatchWindow, Choice, Fleet, RefusedGrammars
from router.metrics.stats import ModelStats, WorkerTarget
from router.serving.account import count_choice, decision_line
from router.serving.admission import AdmissionRules, SettingsStore
from router.serving.completion import Completion, CompletionSpec
from router.serving.generation import Generation, GenerationRequest
from router.serving.isolation import Isolation
from router.serving.load import LoadMeter
from router.serving.mailbox import Mailbox
from router.serving.pending_workers import PendingWorkers
from router.serving.resumption import Resumption
from router.tokens.encoder import PromptEncoder
from worker.wire.admission import AdmissionChange
from worker.wire.detokenizer import RequestText, StopStrings
from worker.wire.limits import Limits
from worker.wire.messages import AttachSnapshot, WorkerUpdate
from worker.wire.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_RETRIES = 2
"""Further workers that are tried when one did not get a request."""


class ServedModel:
    """Listens to the channels of a model's workers and places requests on them.

    Args:
        route: the model's names.
        gateway_id: this gateway.
        transport: reaches the model's workers.
        tokenizer: of the model.
        encoder: makes prompts.
        fleet: the model's workers.
        defaults: sampling values for what requests leave open.
        max_tenants: tenants that metrics distinguish.
        settings: what the model's gateways share; None where this is the only one.
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
        max_tenants: int = 32,
        settings: SettingsStore | None = None,
    ) -> None:
        self.route = route
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.fleet = fleet
        self._batch_window = BatchWindow(fleet)
        self.defaults = defaults
        self.stats = ModelStats(max_tenants)
        self.set_target(WorkerTarget(route.min_workers, route.min_workers, route.max_workers))
        self._gateway_id = gateway_id
        self._transport = transport
        self._channels: dict[str, WorkerChannel] = {}
        self._pending_workers = PendingWorkers(
            route.routing.no_worker_timeout_s, on_demand=route.on_demand
        )
        self._closed = False
        self.admission = AdmissionRules(settings, self._notify_admission)
        self.refused_grammars = RefusedGrammars()
        self._isolation = Isolation(route.routing.max_request_attempts, self._channels)
        self._resumption = Resumption(route.routing, self._isolation, self._place, self.stats)
        self.load = LoadMeter(self.stats, fleet, time.monotonic)
        self._log_file = _decision_log(route, gateway_id)

    @property
    def ready(self) -> bool:
        """Whether requests are served: by a worker, or by one that is started for them."""
        return self.fleet.ready or self.route.on_demand

    @property
    def vocab_size(self) -> int:
        """Tokens that requests may name."""
        info = self.fleet.info
        return info.vocab_size if info is not None else self.tokenizer.vocab_size

    async def start(self) -> None:
        """Follows the set of workers from now on."""
        await self.admission.start()
        self._transport.watch_workers(self._set_workers)

    async def close(self) -> None:
        """Detaches from all workers; requests under way end with an error."""
        self._closed = True
        await self.admission.close()
        self._resumption.close()
        self._pending_workers.close()
        for channel in list(self._channels.values()):
            await channel.close()
        if self._log_file is not None:
            self._log_file.close(self.fleet)

    def generation(self, request: GenerationRequest) -> Generation:
        """The request with its completions, not placed yet."""
        mailbox: Mailbox[Completion] = Mailbox()
        sampling = request.feasibility.sampling
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        now = request.arrived_at
        if now is None:
            now = asyncio.get_running_loop().time()
        shared, stop = sampling.amended(n=1, seed=None), StopStrings(sampling.stop)
        others = shared
        if shared.prompt_logprobs is not None and not request.stream:
            others = shared.amended(prompt_logprobs=None)  # the first of each prompt has them
        completions = []
        unique = secrets.token_hex(8)  # clients choose request ids, and may choose one twice
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
            completions.append(self._completion(spec, stop, mailbox, request.stream, now))
        for prompt in request.prompts:
            prompt.priority = request.priority
            self.stats.prompt_tokens += prompt.num_tokens
            self.stats.prompt_length.observe(prompt.num_tokens)
        explain = self.route.routing.explain_routing
        return Generation(request, completions, mailbox, self._place, explain=explain)

    def set_target(self, target: WorkerTarget) -> None:
        """How many workers there should be from now on, for metrics."""
        self.stats.workers = target

    # ChannelListener

    def on_snapshot(self, worker_id: str, snapshot: AttachSnapshot) -> None:
        """See ChannelListener."""
        self.fleet.attach(worker_id, snapshot)
        self.refused_grammars.clear()
        # It may have left while the stream was being opened, when the fleet did not know it yet.
        self.fleet.set_draining(worker_id, self._channels[worker_id].leaving)
        self._pending_workers.resolved(worker_id)
        if self.admission.change.given():
            self._channels[worker_id].set_admission(self.admission.change)
        if self._log_file is not None:
            self._log_file.worker(self.fleet.worker(worker_id))
        state = "loading" if snapshot.info is None else "ready"
        self._log("worker %s attached, epoch %d, %s", worker_id, snapshot.epoch, state)
        if self.fleet.ready:
            self._resumption.wake()
            self._isolation.wake()

    def on_update(self, worker_id: str, update: WorkerUpdate) -> None:
        """See ChannelListener."""
        self.fleet.update(worker_id, update)

    def on_accepted(self, worker_id: str, request_id: str, epoch: int, ordinal: int) -> None:
        """See ChannelListener."""
        self.fleet.accepted(worker_id, request_id, epoch, ordinal)

    def on_lost(self, worker_id: str, reason: str) -> None:
        """See ChannelListener."""
        self.fleet.lose(worker_id)
        self._log("worker %s lost: %s", worker_id, reason)

    def on_closed(self, worker_id: str) -> None:
        """See ChannelListener."""
        self.fleet.remove(worker_id)
        self._pending_workers.resolved(worker_id)
        self._channels.pop(worker_id, None)
        self._isolation.forget(worker_id)
        self.stats.routed.pop(worker_id, None)

    def _set_workers(self, worker_ids: Iterable[str]) -> None:
        if self._closed:
            return
        members = dict.fromkeys(worker_ids)
        if not members and self._channels:
            self._pending_workers.all_left()
        for worker_id in members:
            if worker_id not in self._channels:
                channel = WorkerChannel(worker_id, self._gateway_id, self._transport, self)
                self._channels[worker_id] = channel
                self._pending_workers.add(worker_id)
                channel.start()
        for worker_id, channel in self._channels.items():
            leaving = worker_id not in members
            channel.set_leaving(leaving)
            self.fleet.set_draining(worker_id, leaving)
            if leaving:
                self._pending_workers.resolved(worker_id)

    def _notify_admission(self, change: AdmissionChange) -> list[str]:
        """Changes how the workers admit requests; returns the ids of those that were reached."""
        return [
            worker_id
            for worker_id, channel in self._channels.items()
            if channel.set_admission(change)
        ]

    def _completion(
        self,
        spec: CompletionSpec,
        stop: StopStrings,
        mailbox: Mailbox[Completion],
        stream: bool,
        now: float,
    ) -> Completion:
        sampling = spec.sampling
        text = RequestText(
            self.tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens),
            stop=stop,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        return Completion(
            spec,
            text=text,
            mailbox=mailbox,
            stream=stream,
            stats=self.stats,
            now=now,
            on_first=self._begun,
            on_loss=self._lost,
            on_end=self._ended,
        )

    async def _place(self, completion: Completion) -> None:
        """Hands the completion to a worker. Raises ApiError where none takes it."""
        stats, num_tokens = self.stats, completion.spec.prompt.num_tokens
        stats.pending_requests += 1
        stats.pending_tokens += num_tokens
        try:
            await self._try_workers(completion)
        finally:
            stats.pending_requests -= 1
            stats.pending_tokens -= num_tokens

    async def _try_workers(self, completion: Completion) -> None:
        """Chooses a worker and hands the completion over; tries others that may still take it."""
        tried: list[str] = []
        while not completion.finished:
            problem = await self._try_worker(completion, tried)
            if problem is None:
                return
            self._release(completion)
            self._log(
                "submit to worker %s failed: %s",
                completion.worker_id,
                problem,
                request_id=completion.spec.request_id,
            )
            if len(tried) > MAX_RETRIES:
                raise self._nobody(completion, problem)
            self.stats.retries += 1
            completion.begin_again()

    async def _try_worker(self, completion: Completion, tried: list[str]) -> str | None:
        """Submits to the best worker that was not tried yet; returns why it did not get it."""
        spec = completion.spec
        choice = await self._choose_apart(completion, tried)
        if choice is None and await self._pending_workers.wait(lambda: self.fleet.ready):
            choice = await self._choose_apart(completion, tried)
        if choice is None:
            raise self._nobody(completion)
        if completion.finished:  # its client has left meanwhile
            self._isolation.leave(completion, choice.worker_id)
            self.fleet.release(choice.worker_id, spec.request_id)
            return None
        tried.append(choice.worker_id)
        if not completion.token_ids:
            completion.choice = choice
        channel = self._channels.get(choice.worker_id)
        if channel is None:
            return "it has left"
        submit = completion.submit_to(channel, asyncio.get_running_loop().time())
        submit.num_expected_cached = choice.hit_tokens
        try:
            await channel.submit(submit, completion)
        except WorkerUnreachable as error:
            if error.had_it:
                completion.lose(str(error))
                return None
            return str(error)
        except Refused as error:
            if error.rejection.status == 429:
                completion.rejection = error.rejection
            if error.rejection.status == 429 or error.rejection.status >= 500:
                return error.rejection.message
            if completion.num_losses:  # a worker had taken it, so another one may
                return error.rejection.message
            self._release(completion)
            grammar = spec.sampling.structured_outputs
            if error.rejection.is_final and grammar is not None:
                self.refused_grammars.add(grammar, error.rejection.message)
            param = spec.feasibility.param(error.rejection.param)
            raise rejected(error.rejection, param) from error
        if not completion.finished:  # the answer may come after what it ended by
            completion.rejection = None
        count_choice(self.stats, choice)
        routed = self.stats.routed
        routed[choice.worker_id] = routed.get(choice.worker_id, 0) + 1
        return None

    async def _choose_apart(self, completion: Completion, tried: list[str]) -> Choice | None:
        """As `_choose`, apart from others where one is a suspect, see Isolation."""
        isolation = self._isolation
        while True:
            num_changes = isolation.num_changes
            excluded = isolation.excluded(completion)
            choice = await self._choose(completion, [*tried, *excluded])
            if choice is not None:
                if isolation.enter(completion, choice.worker_id):
                    return choice
                self.fleet.release(choice.worker_id, completion.spec.request_id)
            elif not excluded:
                return None
            elif not await isolation.wait(completion, num_changes):
                return await self._choose(completion, tried)

    async def _choose(self, completion: Completion, tried: Sequence[str]) -> Choice | None:
        """Books a place at the best worker; None where there is none.

        Raises ApiError, before anything is booked, where no worker could ever run it.
        """
        spec, prompt = completion.spec, completion.prompt
        kinds = self.fleet.limits
        num_resumed = len(completion.token_ids)
        problems = {
            kind: problem
            for kind in kinds
            if (problem := spec.feasibility.at(kind, prompt, num_resumed)) is not None
        }
        excluded = tried
        if problems:
            if len(problems) == len(kinds):
                problem = next(iter(problems.values()))
                raise bad_request(problem.message, problem.param)
            workers = self.fleet.workers
            unfit = [w.worker_id for w in workers if w.info and Limits.of(w.info) in problems]
            excluded = [*tried, *unfit]
        return await self._batch_window.place(spec.request_id, prompt, excluded)

    def _nobody(self, completion: Completion, problem: str = "try again shortly") -> ApiError:
        """The error for the client of a completion that no worker takes."""
        rejection = completion.rejection
        if rejection is None:
            self.stats.unplaced += 1
            return no_worker(self.route.name, problem)
        completion.refuse()
        return rejected(rejection)

    def _begun(self, completion: Completion) -> None:
        self._release(completion)
        if completion.choice is not None and not completion.attempt:
            error = completion.at_worker_s - completion.choice.first_token_s
            self.stats.prediction_error.observe(abs(error))

    def _lost(self, completion: Completion, reason: str) -> None:
        self._release(completion)
        self._resumption.lost(completion, reason)

    def _release(self, completion: Completion) -> None:
        self._isolation.leave(completion, completion.worker_id)
        self.fleet.release(completion.worker_id, completion.spec.request_id)

    def _ended(self, completion: Completion) -> None:
        self._release(completion)
        if self._log_file is not None and (line := decision_line(completion)) is not None:
            self._log_file.decided(line, self.fleet)

    def _log(self, message: str, *values: object, request_id: str | None = None) -> None:
        logger.info(message, *values, extra={"model": self.route.name, "request_id": request_id})


def _decision_log(route: ModelRoute, gateway_id: str) -> DecisionLog | None:
    options = route.routing
    if not options.decision_log:
        return None
    return DecisionLog(
        options.decision_log,
        route.name,
        gateway_id,
        max_bytes=options.decision_log_mib << 20,
        key_file=options.decision_log_key_file,
    )


def _wrap(seed: int) -> int:
    """Keeps the seeds of further choices within 64 bits."""
    return seed if seed < 2**64 else seed - 2**64
