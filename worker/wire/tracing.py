"""OpenTelemetry spans with W3C context; neither imported nor paid for where none are asked for.

They go where our own configuration says, or else OpenTelemetry's standard variables:
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT (or OTEL_EXPORTER_OTLP_ENDPOINT) turns tracing on as well.
OTEL_TRACES_SAMPLER and its argument choose which are kept.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TRACEPARENT = "traceparent"

Attributes = Mapping[str, str | int | float | bool]


def create_tracing(process: str, endpoint: str = "") -> Tracing | None:
    """Exports spans in the name of a process; None where nobody asks for it.

    Args:
        process: its name.
        endpoint: URL that takes them; empty leaves it to the environment.

    Raises:
        ValueError: somebody does, but the packages are missing.
    """
    if not endpoint and not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(
            f"traces are asked for, but {error.name} is missing: pip install 'rayfleet[tracing]'"
        ) from error
    return Tracing(process, BatchSpanProcessor(OTLPSpanExporter(endpoint or None)))


class Tracing:
    """Makes spans of one process.

    Args:
        process: its name.
        processor: takes the spans that have ended.
    """

    def __init__(self, process: str, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "rayfleet"),
                "service.instance.id": process,
            }
        )
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rayfleet")

    def start(
        self, name: str, parent: str, *, start_ns: int, server: bool, attributes: Attributes
    ) -> Span | None:
        """A span that has begun; None where this trace is not kept.

        Args:
            name: what the span is about.
            parent: W3C traceparent; anything else begins a new trace.
            start_ns: Unix time in nanoseconds.
            server: whether it answers another process.
            attributes: what is known already.
        """
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(
            name,
            context=TraceContextTextMapPropagator().extract({TRACEPARENT: parent}),
            kind=SpanKind.SERVER if server else SpanKind.INTERNAL,
            attributes=dict(attributes),
            start_time=start_ns,
        )
        return span if span.is_recording() else None

    def close(self) -> None:
        """Sends what has not been sent."""
        self._provider.shutdown()


def traceparent_of(span: Span) -> str:
    """A span's W3C traceparent, for those that it calls."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier[TRACEPARENT]


def fail(span: Span, problem: str) -> None:
    """Marks a span as one of something that went wrong."""
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, problem))
