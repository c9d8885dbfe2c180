"""Traces of a worker: one span per request for its frontend, with a child span for its engine.

The engine's process creates no spans, since its loop must not wait. The frontend creates the
engine's spans from its reports.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.protocol.blocks import TOKEN_BYTES
from worker.protocol.messages import Submit, TokenDelta
from worker.protocol.times import FirstTokenTimes
from worker.protocol.tracing import Tracing, fail, traceparent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass(slots=True)
class _OpenRequest:
    span: Span
    attempt: int
    sent_ns: int
    num_prompt: int
    first_ns: int = 0
    times: FirstTokenTimes | None = None
    num_tokens: int = 0


class WorkerTraces:
    """Spans of the frontend's requests that have a traceparent.

    Args:
        tracing: creates the spans.
        worker_id: id of the worker, which is added to the spans.
    """

    def __init__(self, tracing: Tracing, worker_id: str) -> None:
        self._tracing = tracing
        self._worker_id = worker_id
        self._open: dict[str, _OpenRequest] = {}

    def submits_sent(self, submits: Iterable[Submit], arrived_ns: int) -> None:
        """Starts spans for submits that were sent to the engine.

        Args:
            arrived_ns: time of arrival at the frontend, as Unix time in nanoseconds.
        """
        for submit in submits:
            if not submit.traceparent:
                continue
            span = self._tracing.start(
                "worker",
                submit.traceparent,
                start_ns=arrived_ns,
                server=True,
                attributes={
                    "rayfleet.worker_id": self._worker_id,
                    "rayfleet.request_id": submit.request_id,
                    "rayfleet.attempt": submit.attempt,
                },
            )
            if span is not None:
                now, num_prompt = time.time_ns(), len(submit.prompt) // TOKEN_BYTES
                earlier = self._open.pop(submit.request_id, None)
                if earlier is not None:
                    self._end(earlier, now, "abort", "replaced by another attempt")
                self._open[submit.request_id] = _OpenRequest(span, submit.attempt, now, num_prompt)

    def deltas_received(self, deltas: Iterable[TokenDelta]) -> None:
        """Handles the deltas of a report, and ends the spans of finished requests."""
        if not self._open:
            return
        now = time.time_ns()
        for delta in deltas:
            found = self._open.get(delta.request_id)
            if found is None or found.attempt != delta.attempt:
                continue
            found.num_tokens += len(delta.token_ids)
            if delta.times is not None:
                found.first_ns, found.times = now, delta.times
            if delta.finish_reason is not None:
                del self._open[delta.request_id]
                self._end(found, now, delta.finish_reason, delta.error)

    def engine_lost(self, reason: str) -> None:
        """Ends all open spans with an error, since the engine has failed."""
        now = time.time_ns()
        for found in self._open.values():
            self._end(found, now, "error", reason)
        self._open.clear()

    def close(self) -> None:
        """Ends all open spans and exports the remaining ones."""
        self.engine_lost("the worker was shut down")
        self._tracing.close()

    def _end(self, found: _OpenRequest, now: int, finish_reason: str, problem: str | None) -> None:
        engine = self._tracing.start(
            "engine",
            traceparent_of(found.span),
            start_ns=found.sent_ns,
            server=False,
            attributes={
                "rayfleet.worker_id": self._worker_id,
                "rayfleet.finish_reason": finish_reason,
                "gen_ai.usage.input_tokens": found.num_prompt,
                "gen_ai.usage.output_tokens": found.num_tokens,
            },
        )
        assert engine is not None, "spans of a sampled trace are recorded"
        if (times := found.times) is not None:
            engine.set_attribute("rayfleet.queue_s", times.queue_s)
            engine.set_attribute("rayfleet.prefill_s", times.prefill_s)
            admitted_ns = found.first_ns - int(times.prefill_s * 1e9)
            engine.add_event("admitted", timestamp=max(admitted_ns, found.sent_ns))
            engine.add_event("first token", timestamp=found.first_ns)
        for span in (engine, found.span):
            if problem is not None:
                fail(span, problem)
            span.end(now)
