"""Steps of models with canvases, which generate a canvas after the known tokens in rounds."""

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

    A step computes either known tokens, in rows of any length, or canvases in rounds: known tokens
    are computed once, causally; canvases are computed bidirectionally. Keys and values of a canvas
    are overwritten once its tokens are known. A preempted request recomputes its canvas, with the
    same result.
    """

    def _build(self, builder: StepBuilder, now: float) -> None:
        state, size = self._state, self._policy.size
        # Known tokens: prompts and finished canvases come first, since canvases wait for them.
        left = state.config.max_num_batched_tokens
        known = [(r, r.num_pending - size) for r in state.running if r.num_pending > size]
        lengths = []
        for _, pending in known:
            lengths.append(min(pending, left))
            left -= lengths[-1]
        # New requests: those whose known tokens are all cached only have a canvas to compute.
        admitted = self._admitted(left, builder, now, is_shared=bool(known))
        new_lengths = []
        for new in admitted:
            new_lengths.append(min(new.cost - size, left))
            left -= new_lengths[-1]
        self._add_rows(known, lengths, builder)
        if builder.num_tokens or any(new_lengths):
            for new, length in zip(admitted, new_lengths, strict=True):
                self._admission.launch(new, length, builder)
        else:
            self._add_canvases(admitted, builder)
        self._lifecycle.deferred.clear()

    def _admitted(
        self, tokens: int, builder: StepBuilder, now: float, *, is_shared: bool
    ) -> list[Admitted]:
        """Requests admitted to the step, which has room for `tokens` known tokens."""
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

    def _add_canvases(self, admitted: Sequence[Admitted], builder: StepBuilder) -> None:
        """Adds the canvases of running requests, then those of admitted ones, while there are
        tokens."""
        state, size = self._state, self._policy.size
        num_left = state.config.max_num_batched_tokens // size
        new = {one.request.request_id for one in admitted}
        for request in list(state.running):
            if num_left and request.request_id not in new and self._add_canvas(request, builder):
                num_left -= 1
        for one in admitted:
            self._admission.launch(one, size if num_left > 0 else 0, builder)
            num_left -= 1
        if not self._any_watched():
            builder.max_rounds = MAX_ROUNDS

    def _add_canvas(self, request: Request, builder: StepBuilder) -> bool:
        """Adds the canvas of a running request if there are pages; returns whether there are."""
        lease, size = request.lease, self._policy.size
        if lease is None or request.num_pending != size:
            return False
        if request.request_id in self._lifecycle.deferred:
            return False
        if not self._claims.extend(request, lease, size, builder):
            return False
        builder.add_row(request, lease, size)
        return True

    def _commit_pages(self, planned: InFlightRow, num_computed: int) -> None:
        """Commits the full pages of known tokens to the prefix cache, and returns pages behind
        windows."""
        cache = self._state.cache
        cache.commit(planned.lease, planned.request.token_ids, num_computed)
        if cache.has_windows:
            cache.advance(planned.lease, num_computed)
