"""The payload of metrics: what is aggregated, and that a dropped report loses nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tutti_mooncake.connectors.vllm.counters import Counters
from tutti_mooncake.connectors.vllm.stats import StatsReader, TuttiPromMetrics, TuttiStats


def prometheus(engines: int = 2) -> tuple[TuttiPromMetrics, CollectorRegistry]:
    registry = CollectorRegistry()

    def bound(kind: type[Any]) -> Any:
        return lambda **more: kind(registry=registry, **more)

    types = {kind: bound(kind) for kind in (Counter, Gauge, Histogram)}
    labels: dict[int, list[object]] = {engine: ["model", str(engine)] for engine in range(engines)}
    return TuttiPromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["model_name", "engine"], labels), registry


def test_a_dropped_report_loses_nothing() -> None:
    counters = Counters()
    reader = StatsReader(counters)
    metrics, registry = prometheus()
    for step in range(1, 5):
        counters.requests, counters.hit_tokens = step, 100 * step
        assert reader.changed()
        stats = reader.read({"tutti_pins": {"": step}}, {"tutti_evicted_blocks_total": {"": step}})
        assert stats is not None and not reader.changed()
        if step in (1, 4):
            metrics.observe(stats.to_dict(), 1)
    assert reader.read({}, {"tutti_evicted_blocks_total": {"": 4}}) is None
    text = generate_latest(registry).decode()
    assert 'tutti_requests_total{engine="1",model_name="model"} 4.0' in text
    assert 'tutti_requests_total{engine="0",model_name="model"} 0.0' in text
    assert 'tutti_hit_tokens_total{engine="1",model_name="model",tier="ssd"} 400.0' in text
    assert 'tutti_evicted_blocks_total{engine="1",model_name="model"} 4.0' in text
    assert 'tutti_pins{engine="1",model_name="model"} 4.0' in text


def test_the_log_adds_up_an_interval() -> None:
    counters = Counters()
    reader = StatsReader(counters)
    interval = TuttiStats()
    assert interval.is_empty()
    for step in (1, 2):
        counters.requested_tokens, counters.hit_tokens, counters.local_hit_tokens = 1000 * step, 500 * step, 250 * step
        counters.bytes_loaded, counters.load_seconds = 4 * 10**9 * step, 2.0 * step
        stats = reader.read({"tutti_pins": {"": step}}, {"tutti_evicted_blocks_total": {"": 0}})
        assert stats is not None
        interval = interval.aggregate(stats)
    line = interval.reduce()
    assert (line["requested tokens"], line["hit rate ssd"], line["hit rate hbm"]) == (2000, 0.5, 0.25)
    assert (line["loaded GB"], line["load GB/s"]) == (8.0, 2.0)
    interval.reset()
    assert interval.is_empty()
