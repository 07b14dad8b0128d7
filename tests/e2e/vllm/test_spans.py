"""Spans of loads, through vLLM's tracing and the real OpenTelemetry library."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.e2e.vllm.fake_store import FakeStore, engine_store
from tutti_mooncake.connectors.vllm.accounting import Accounting
from tutti_mooncake.connectors.vllm.spans import Spans
from tutti_mooncake.store.request_log import RequestLog

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def config(endpoint: str | None) -> Any:
    return SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint))


def test_load_is_a_span_in_the_requests_trace() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    request: Any = SimpleNamespace(request_id="r1", trace_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    for endpoint in (None, "http://127.0.0.1:1"):
        spans = Spans(config(endpoint))
        accounting = Accounting(engine_store(FakeStore()).counters, RequestLog(), spans, 4)
        accounting.load_ended(request, 0.25, 10, 9, 4096, layerwise=True)
        assert spans.enabled is (endpoint is not None)
    (span,) = exporter.get_finished_spans()
    assert span.name == "tutti.load" and span.parent is not None and span.context is not None
    assert format(span.context.trace_id, "032x") == TRACE and format(span.parent.span_id, "016x") == PARENT
    assert span.start_time is not None and span.end_time is not None
    assert abs((span.end_time - span.start_time) / 1e9 - 0.25) < 1e-6 and abs(span.end_time / 1e9 - time.time()) < 60
    attributes = dict(span.attributes or {})
    assert attributes == {
        "gen_ai.request.id": "r1",
        "tutti.blocks": 10,
        "tutti.blocks_ok": 9,
        "tutti.bytes": 4096,
        "tutti.layerwise": True,
    }
