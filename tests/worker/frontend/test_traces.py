"""Spans of a worker: its frontend's are children of the gateway's, the engine's of the
frontend's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.support.worker.trace_collector import trace_collector
from worker.frontend.traces import WorkerTraces
from worker.protocol.messages import Submit, TokenDelta
from worker.protocol.sampling import SamplingParams
from worker.protocol.times import FirstTokenTimes
from worker.protocol.tracing import ENDPOINTS, Tracing, create_tracing

TRACE, GATEWAY = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def submit(request_id: str, traceparent: str, attempt: int = 0) -> Submit:
    return Submit(
        request_id=request_id,
        gateway_id="g",
        prompt=bytes(12),
        sampling=SamplingParams(seed=1),
        attempt=attempt,
        traceparent=traceparent,
    )


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter: InMemorySpanExporter) -> WorkerTraces:
    return WorkerTraces(Tracing("worker w", SimpleSpanProcessor(exporter)), "w")


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_front_and_engine_are_children_of_the_gateway(
    exporter: InMemorySpanExporter, traces: WorkerTraces
) -> None:
    traces.submits_sent([submit("r", f"00-{TRACE}-{GATEWAY}-01"), submit("untraced", "")], 1)
    traces.deltas_received([TokenDelta("r", 0, [5], times=FirstTokenTimes(0.25, 0.0))])
    traces.deltas_received(
        [TokenDelta("r", 7, [5], "stop"), TokenDelta("untraced", 0, [5], "stop")]
    )
    assert not exporter.get_finished_spans(), "the end of another attempt ended it"
    traces.deltas_received([TokenDelta("r", 0, [6, 7], "length")])
    spans = by_name(exporter)
    front, engine = spans["worker"], spans["engine"]
    assert front.parent is not None
    assert engine.parent is not None
    assert f"{front.parent.trace_id:032x}-{front.parent.span_id:016x}" == f"{TRACE}-{GATEWAY}"
    assert engine.parent.span_id == front.context.span_id
    assert front.start_time == 1
    assert front.start_time < engine.start_time <= engine.end_time == front.end_time
    assert engine.attributes is not None
    assert engine.attributes["rayfleet.queue_s"] == 0.25
    assert engine.attributes["gen_ai.usage.output_tokens"] == 3
    assert engine.attributes["rayfleet.finish_reason"] == "length"
    assert [event.name for event in engine.events] == ["admitted", "first token"]


def test_a_lost_engine_ends_its_spans_as_errors(
    exporter: InMemorySpanExporter, traces: WorkerTraces
) -> None:
    traces.submits_sent([submit("r", f"00-{TRACE}-{GATEWAY}-01")], 1)
    traces.engine_lost("rank 0 was killed")
    for span in by_name(exporter).values():
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "rank 0 was killed"
    traces.deltas_received([TokenDelta("r", 0, [6], "length")])
    assert len(exporter.get_finished_spans()) == 2


def test_a_later_attempt_ends_the_earlier_ones_spans(
    exporter: InMemorySpanExporter, traces: WorkerTraces
) -> None:
    for attempt in range(2):
        traces.submits_sent([submit("r", f"00-{TRACE}-{GATEWAY}-01", attempt)], 1)
    ended = [s.attributes for s in exporter.get_finished_spans() if s.name == "worker"]
    assert [span["rayfleet.attempt"] for span in ended if span is not None] == [0]
    traces.deltas_received([TokenDelta("r", 1, [6], "length")])
    assert len(exporter.get_finished_spans()) == 4


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    with trace_collector() as told:
        yield told


def test_spans_are_exported_as_the_environment_says(
    collector: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, bodies = collector
    monkeypatch.setenv(ENDPOINTS[0], url)
    tracing = create_tracing("worker w")
    assert tracing is not None
    traces = WorkerTraces(tracing, "w")
    traces.submits_sent([submit("r", f"00-{TRACE}-{GATEWAY}-01")], 1)
    traces.deltas_received([TokenDelta("r", 0, [6], "length")])
    traces.close()
    [body] = bodies
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("rayfleet", "worker w")
    assert {span.name for s in resource.scope_spans for span in s.spans} == {"worker", "engine"}
    assert {span.trace_id.hex() for s in resource.scope_spans for span in s.spans} == {TRACE}


def test_configuration_overrides_the_environment(
    collector: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve does not merge `ray_actor_options`: a variable set in them is easily lost."""
    url, bodies = collector
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    tracing = create_tracing("gateway", url)
    assert tracing is not None
    span = tracing.start("chat", "", start_ns=1, server=True, attributes={})
    assert span is not None
    span.end()
    tracing.close()
    assert len(bodies) == 1


@pytest.mark.slow
def test_without_tracing_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    code = (
        "import sys, router.serving, worker.frontend.server, worker.protocol.tracing as t\n"
        "assert t.create_tracing('x') is None\n"
        "sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
