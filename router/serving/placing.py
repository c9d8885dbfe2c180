"""Placing: finds a completion a worker that takes it, however often its worker is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from router.channel import Refused, WorkerChannel, WorkerUnreachable
from router.config import ModelRoute
from router.errors import ApiError, bad_request, no_worker, rejected
from router.explain import DecisionLog
from router.fleet import BatchWindow, Choice, Fleet, RefusedGrammars
from router.metrics.stats import ModelStats
from router.serving.account import count_choice, decision_line
from router.serving.completion import Completion
from router.serving.isolation import Changes, Isolation
from worker.wire.limits import Limits

logger = logging.getLogger(__name__)

ATTACH_S = 5.0
"""Seconds that a request waits for a worker that is there; to attach to it takes 0.1 s."""
MAX_WAITING = 4096
"""Requests that may wait for a worker at the same time."""
_MAX_RETRIES = 2
"""Further workers that are tried when one did not get a request."""
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 2.0
"""Seconds between two looks for a worker; one that becomes ready is seen at once."""


class Placer:
    """Places the completions of one model, and waits for workers where none can take them.

    - A new one waits where a worker is to come: in a rolling update the last may leave when the
      next has just come, or before.
    - One whose worker was lost is placed again, at another worker or at the same when it is back;
      its client sees a pause. One that may be why workers were lost goes apart from others, then is
      given up; see Isolation.

    Args:
        route: the model, and for how long its requests wait.
        fleet: its workers.
        channels: to them, by id.
        stats: where decisions, retries and resubmissions are counted.
        refused_grammars: where grammars that no worker can use are noted.
        log: where decisions are recorded; None for nowhere.
    """

    def __init__(
        self,
        route: ModelRoute,
        fleet: Fleet,
        channels: Mapping[str, WorkerChannel],
        stats: ModelStats,
        refused_grammars: RefusedGrammars,
        log: DecisionLog | None,
    ) -> None:
        self._route = route
        self._fleet = fleet
        self._channels = channels
        self._stats = stats
        self._refused_grammars = refused_grammars
        self._log_file = log
        self._wait_s = route.routing.no_worker_timeout_s
        self._batch_window = BatchWindow(fleet)
        self._changes = Changes()
        self._isolation = Isolation(route.routing.max_request_attempts, channels, self._changes)
        self._pending: dict[str, None] = {}
        """Workers that have come; a stream to them is being opened."""
        self._vacant = route.on_demand
        """Whether all workers that were there have left, or one is started on demand."""
        self._num_waiting = 0
        self._num_ready = 0
        """Times that a worker was attached while some worker was ready."""
        self._resuming: dict[asyncio.Task[None], None] = {}
        self._closed = False

    # What the model notifies it of.

    def expect(self, worker_id: str) -> None:
        """A worker has come; its first report is awaited."""
        self._pending[worker_id] = None
        self._vacant = False

    def attached(self, worker_id: str) -> None:
        """A worker has reported its state, which the fleet knows by now."""
        self.resolved(worker_id)
        if self._fleet.ready:
            self._num_ready += 1
            self._changes.notify()

    def resolved(self, worker_id: str) -> None:
        """A worker is awaited no longer. Nothing happens a second time."""
        if self._pending.pop(worker_id, worker_id) is None:
            self._changes.notify()

    def all_left(self) -> None:
        """The set of workers has become empty."""
        self._vacant = True

    def forget(self, worker_id: str) -> None:
        """A worker's channel has ended."""
        self.resolved(worker_id)
        self._isolation.forget(worker_id)

    def close(self) -> None:
        """Nobody will come: who waits for a worker, or loses his, ends with an error."""
        self._closed = True
        for task in self._resuming:
            task.cancel()
        self._vacant = False
        self._pending.clear()
        self._changes.notify()

    # CompletionOwner

    def begun(self, completion: Completion) -> None:
        """Notes the first token: what was booked for its prompt is released."""
        self._release(completion)
        if completion.choice is not None and not completion.attempt:
            error = completion.times.at_worker_s - completion.choice.first_token_s
            self._stats.prediction_error.observe(abs(error))

    def lost(self, completion: Completion, reason: str) -> None:
        """Its worker is gone: begins the next attempt, or ends it with an error."""
        self._release(completion)
        extra = {"request_id": completion.spec.request_id, "worker_id": completion.worker_id}
        if self._closed:
            completion.fail(reason)
        elif (problem := self._isolation.why_given_up(completion, reason)) is not None:
            completion.fail(problem)
        else:
            num_tokens = len(completion.token_ids)
            logger.warning(
                "continues elsewhere after %d tokens: %s", num_tokens, reason, extra=extra
            )
            self._stats.resubmissions += 1
            task = asyncio.create_task(self._place_again(completion, reason))
            self._resuming[task] = None
            task.add_done_callback(self._resuming.pop)

    def ended(self, completion: Completion) -> None:
        """Notes the end: releases what is booked, and records the decision."""
        self._release(completion)
        if self._log_file is not None and (line := decision_line(completion)) is not None:
            self._log_file.decided(line, self._fleet)

    async def place(self, completion: Completion) -> None:
        """Hands the completion to a worker. Raises ApiError where none takes it."""
        stats, num_tokens = self._stats, completion.spec.prompt.num_tokens
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
            extra = {"model": self._route.name, "request_id": completion.spec.request_id}
            worker_id = completion.worker_id
            logger.info("submit to worker %s failed: %s", worker_id, problem, extra=extra)
            if len(tried) > _MAX_RETRIES:
                raise self._nobody(completion, problem)
            self._stats.retries += 1
            completion.begin_again()

    async def _try_worker(self, completion: Completion, tried: list[str]) -> str | None:
        """Submits to the best worker that was not tried yet; returns why it did not get it."""
        spec = completion.spec
        choice = await self._choose_apart(completion, tried)
        if choice is None and await self._wait_for_worker():
            choice = await self._choose_apart(completion, tried)
        if choice is None:
            raise self._nobody(completion)
        if completion.finished:  # its client has left meanwhile
            self._isolation.leave(completion, choice.worker_id)
            self._fleet.release(choice.worker_id, spec.request_id)
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
                self._refused_grammars.add(grammar, error.rejection.message)
            param = spec.feasibility.param(error.rejection.param)
            raise rejected(error.rejection, param) from error
        if not completion.finished:  # the answer may come after what it ended by
            completion.rejection = None
        count_choice(self._stats, choice)
        routed = self._stats.routed
        routed[choice.worker_id] = routed.get(choice.worker_id, 0) + 1
        return None

    async def _choose_apart(self, completion: Completion, tried: list[str]) -> Choice | None:
        """Books it as `_choose` does, apart from others where one is suspect; see Isolation."""
        isolation = self._isolation
        while True:
            num_changes = self._changes.number
            excluded = isolation.excluded(completion)
            choice = await self._choose(completion, [*tried, *excluded])
            if choice is not None:
                if isolation.enter(completion, choice.worker_id):
                    return choice
                self._fleet.release(choice.worker_id, completion.spec.request_id)
            elif not excluded:
                return None
            elif not await isolation.wait(completion, num_changes):
                return await self._choose(completion, tried)

    async def _choose(self, completion: Completion, tried: Sequence[str]) -> Choice | None:
        """Books the completion at the best worker; None where there is none.

        Raises ApiError, before anything is booked, where no worker could ever run it.
        """
        spec, prompt = completion.spec, completion.prompt
        kinds = self._fleet.limits
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
            workers = self._fleet.workers
            unfit = [w.worker_id for w in workers if w.info and Limits.of(w.info) in problems]
            excluded = [*tried, *unfit]
        return await self._batch_window.place(spec.request_id, prompt, excluded)

    def _nobody(self, completion: Completion, problem: str = "try again shortly") -> ApiError:
        """The error for the client of a completion that no worker takes."""
        rejection = completion.rejection
        if rejection is None:
            self._stats.unplaced += 1
            return no_worker(self._route.name, problem)
        completion.times.refused()
        return rejected(rejection)

    async def _wait_for_worker(self) -> bool:
        """Waits for a worker where one is to come; whether there is one then."""
        if self._num_waiting < MAX_WAITING:
            self._num_waiting += 1
            try:
                await self._changes.wait_until(
                    lambda: self._fleet.ready or not (self._vacant or self._pending),
                    self._wait_s if self._vacant else ATTACH_S,
                )
            finally:
                self._num_waiting -= 1
        return self._fleet.ready

    async def _place_again(self, completion: Completion, reason: str) -> None:
        try:
            problem = await self._try_until_placed(completion)
        except asyncio.CancelledError:
            completion.fail("the gateway is shutting down")
            raise
        except Exception:
            # Whatever it was, the client must not wait forever.
            logger.exception("cannot be resumed", extra={"request_id": completion.spec.request_id})
            problem = "internal error: it could not be resumed"
        if problem is not None:
            completion.fail(f"{reason}; then {problem}")

    async def _try_until_placed(self, completion: Completion) -> str | None:
        """Returns why it is given up, None if it continues (or its client has left)."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._wait_s
        pause = FIRST_PAUSE_S
        while not completion.finished:
            completion.begin_again()
            try:
                await self.place(completion)
            except ApiError as error:
                left = deadline - clock()
                if error.status < 429 or left <= 0.0:
                    return error.message
            else:
                return None
            await self._wait_for_another(min(pause, left))
            pause = min(2.0 * pause, LAST_PAUSE_S)
        return None

    async def _wait_for_another(self, seconds: float) -> None:
        """Waits until a further worker is ready, at most so long."""
        num_ready = self._num_ready
        await self._changes.wait_until(lambda: self._num_ready != num_ready, seconds)

    def _release(self, completion: Completion) -> None:
        self._isolation.leave(completion, completion.worker_id)
        self._fleet.release(completion.worker_id, completion.spec.request_id)
