"""Tracing: OpenTelemetry spans with W3C context. The library is imported only where it is on.

It is turned on by an endpoint in our own configuration, or by OpenTelemetry's standard variable
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT (or OTEL_EXPORTER_OTLP_ENDPOINT). OTEL_TRACES_SAMPLER and its
argument choose which traces are kept.
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
    """Tracing of a process; None where it is not turned on.

    Args:
        process: name of the process.
        endpoint: URL that takes spans (OTLP over HTTP); empty leaves it to the environment.

    Raises:
        ValueError: tracing is turned on, but its packages are missing.
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
        process: name of the process.
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
        """Begins a span; None where its trace is not kept.

        Args:
            name: name of the span.
            parent: W3C traceparent; anything else begins a new trace.
            start_ns: beginning, Unix time in nanoseconds.
            server: whether the span answers another process.
            attributes: attributes that are known already.
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
        """Sends the spans that have not been sent."""
        self._provider.shutdown()


def traceparent_of(span: Span) -> str:
    """W3C traceparent of a span, for processes that it calls."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier[TRACEPARENT]


def fail(span: Span, problem: str) -> None:
    """Sets a span's status to error, with a message."""
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, problem))
