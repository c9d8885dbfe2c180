"""Steps of models with canvases, which generate a canvas after the known tokens, in rounds."""

from __future__ import annotations

from collections.abc import Sequence

from worker.core.request import Request
from worker.core.scheduler.admission import Admitted
from worker.core.scheduler.block_policy import MAX_ROUNDS
from worker.core.scheduler.block_steps import BlockSteps
from worker.core.scheduler.policy import StepHeadroom
from worker.core.scheduler.step import InFlightRow, StepBuilder


class CanvasSteps(BlockSteps):
    """Builds steps of models with canvases and applies their results.

        0 ────────────── num_computed ─────────────── known ──────── end of the canvas
        │ in KV cache    │ prompt, or a finished      │ canvas
        │                │ canvas                     │

    Known tokens are computed once, with causal attention. Canvases are computed in rounds, with
    bidirectional attention. A prompt or a finished canvas shares a row with the first round of the
    canvas after it if there are enough tokens and pages. Keys and values of a canvas are
    overwritten once its tokens are known. A preempted request repeats its canvas, with the same
    result.

    A synchronous step runs all rounds of its canvases, so every request must have its canvas in it.
    If the token budget is too small for known tokens and all canvases, known tokens are computed
    first, in a step without canvases.
    """

    def _build(self, builder: StepBuilder, now: float) -> None:
        running = list(self._state.running)
        divide = self._divide if self._policy.mixed_rounds else self._divide_synchronously
        admitted, lengths = divide(running, builder, now)
        # Rows: running requests in their order, since pages are taken from the last ones.
        for request in running:
            self._add(request, lengths[request.request_id], builder)
        for new in admitted:
            self._admission.launch(new, lengths[new.request.request_id], builder)
        self._lifecycle.deferred.clear()
        if not builder.has_rows_without_samples and not self._any_watched():
            builder.max_rounds = MAX_ROUNDS

    def _divide(
        self, running: Sequence[Request], builder: StepBuilder, now: float
    ) -> tuple[list[Admitted], dict[str, int]]:
        """Admits requests and divides the step's tokens among all requests. Returns the admitted
        requests, and the number of positions to compute by request id.

        Running requests that generate get tokens first, then running prompts, then the next
        canvases of requests whose current one is finished, then new requests. Scheduling next
        canvases earlier would take tokens from prompts in every step.
        """
        size, left = self._policy.size, self._state.config.max_num_batched_tokens
        generating = [request for request in running if request.num_pending <= 2 * size]
        prompts = [request for request in running if request.num_pending > 2 * size]
        lengths: dict[str, int] = {}
        for request in generating:
            num_known = request.num_pending - size
            length = min(num_known, left) if num_known else size * (left >= size)
            lengths[request.request_id] = length
            left -= length
        for request in prompts:
            lengths[request.request_id] = self._width(request.num_pending, left)
            left -= lengths[request.request_id]
        for request in generating:
            known = lengths[request.request_id]
            if size < request.num_pending == known + size and left >= size:
                lengths[request.request_id] += size
                left -= size
        admitted = self._admitted(left, builder, now, is_shared=bool(prompts))
        for new in admitted:
            lengths[new.request.request_id] = self._width(new.cost, left)
            left -= lengths[new.request.request_id]
        return admitted, lengths

    def _divide_synchronously(
        self, running: Sequence[Request], builder: StepBuilder, now: float
    ) -> tuple[list[Admitted], dict[str, int]]:
        """Same as `_divide`, for synchronous steps."""
        size, budget = self._policy.size, self._state.config.max_num_batched_tokens
        num_known = sum(request.num_pending - size for request in running)
        tokens = max(0, budget - num_known)
        admitted = self._admitted(tokens, builder, now, is_shared=num_known > 0)
        pending = {request.request_id: request.num_pending for request in running}
        pending |= {new.request.request_id: new.cost for new in admitted}
        has_known = any(number > size for number in pending.values())
        is_split = has_known and sum(pending.values()) > budget
        left, lengths = budget, dict[str, int]()
        for request_id, number in pending.items():
            length = min(number - size, left) if is_split else self._width(number, left)
            lengths[request_id] = length
            left -= length
        return admitted, lengths

    def _width(self, num_pending: int, left: int) -> int:
        """Number of positions of a request to compute, given the number of tokens left in the step.
        The last positions are a whole canvas or known tokens."""
        return num_pending if num_pending <= left else min(num_pending - self._policy.size, left)

    def _admitted(
        self, tokens: int, builder: StepBuilder, now: float, *, is_shared: bool
    ) -> list[Admitted]:
        """Admits requests to the step, which has room for `tokens` tokens; returns them."""
        state = self._state
        if not state.queue.num_requests:
            return []
        headroom = StepHeadroom(
            tokens=tokens,
            max_each=tokens,
            alone=0,
            requests=self._admission.max_requests,
            chunked=True,
        )
        admitted = self._admission.round(headroom, now, is_shared=is_shared)
        if any(state.cache.is_loading(new.lease) for new in admitted):
            state.cache.load_now(builder.seq)
        return admitted

    def _add(self, request: Request, length: int, builder: StepBuilder) -> None:
        """Adds a row of a running request, without its canvas if there are too few pages."""
        lease, num_known = request.lease, request.num_pending - self._policy.size
        if lease is None or request.request_id in self._lifecycle.deferred:
            return
        if length > num_known:
            if self._claims.extend(request, lease, length, builder):
                builder.add_row(request, lease, length)
                return
            length = num_known
        if length and request.lease is lease and request.request_id not in self._lifecycle.deferred:
            self._claims.add_row(request, lease, length, builder)

    def _commit_pages(self, planned: InFlightRow, num_computed: int) -> None:
        """Commits the full pages of known tokens to the prefix cache, and releases pages that are
        behind windows."""
        cache = self._state.cache
        cache.commit(planned.lease, planned.request.token_ids, num_computed)
        if cache.has_windows:
            cache.advance(planned.lease, num_computed)
