"""Steps of models with canvases, which generate a canvas after the known tokens in rounds."""

from __future__ import annotations

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

    Known tokens are computed once, causally, and canvases in both directions, in rounds. A step
    computes both: a prompt or a finished canvas, and the first round of the canvas after it, if
    there are enough tokens and pages, share a row. Keys and values of a canvas are overwritten once
    its tokens are known. A preempted request repeats its canvas, with the same result.
    """

    def _build(self, builder: StepBuilder, now: float) -> None:
        state, size = self._state, self._policy.size
        # Tokens: requests that generate come first, prompts never stall them.
        left = state.config.max_num_batched_tokens
        lengths: dict[str, int] = {}
        is_prompt = {r.request_id: r.num_pending > 2 * size for r in state.running}
        for prompts in (False, True):
            for request in state.running:
                if is_prompt[request.request_id] == prompts:
                    lengths[request.request_id] = self._width(request.num_pending, left)
                    left -= lengths[request.request_id]
        admitted = self._admitted(left, builder, now, is_shared=any(is_prompt.values()))
        new_lengths = []
        for new in admitted:
            new_lengths.append(self._width(new.cost, left))
            left -= new_lengths[-1]
        # Rows: running requests in their order, since pages are taken from the last ones.
        new_ids = {new.request.request_id for new in admitted}
        for request in list(state.running):
            if request.request_id not in new_ids:
                self._add(request, lengths[request.request_id], builder)
        for new, length in zip(admitted, new_lengths, strict=True):
            self._admission.launch(new, length, builder)
        self._lifecycle.deferred.clear()
        if not builder.has_rows_without_samples and not self._any_watched():
            builder.max_rounds = MAX_ROUNDS

    def _width(self, num_pending: int, left: int) -> int:
        """Positions of a request to compute, of which the last ones are a whole canvas or known
        tokens, given the number of tokens left in the step."""
        return num_pending if num_pending <= left else min(num_pending - self._policy.size, left)

    def _admitted(
        self, tokens: int, builder: StepBuilder, now: float, *, is_shared: bool
    ) -> list[Admitted]:
        """Requests admitted to the step, which has room for this number of tokens."""
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
        """Adds a row of a running request; without its canvas if there are too few pages."""
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
        """Commits the full pages of known tokens to the prefix cache, and gives back pages behind
        windows."""
        cache = self._state.cache
        cache.commit(planned.lease, planned.request.token_ids, num_computed)
        if cache.has_windows:
            cache.advance(planned.lease, num_computed)
