"""What vLLM logs and exports of the connector: the growth of its counters since the last step, and gauges.

The payload travels from the engine's core to vLLM's front end as plain data, `{kind: {metric: {label value: number}}}`, with the label
value "" for metrics without a label of their own. Its kinds are `counters`, how much each has grown, for the log; `totals`, their values,
from which Prometheus' counters are made, since vLLM drops the payload of some steps; and `gauges`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tutti_mooncake.connectors.vllm.counters import Counters
from tutti_mooncake.metrics import ENGINE_METRICS

Values = dict[str, dict[str, float]]
_COUNTERS: dict[str, dict[str, str]] = {
    "tutti_requests_total": {"": "requests"},
    "tutti_requested_tokens_total": {"": "requested_tokens"},
    "tutti_hit_tokens_total": {"hbm": "local_hit_tokens", "ssd": "hit_tokens", "remote": "fetched_tokens"},
    "tutti_miss_tokens_total": {"": "miss_tokens"},
    "tutti_requested_blocks_total": {"": "requested_blocks"},
    "tutti_hit_blocks_total": {"hbm": "local_hit_blocks", "ssd": "hit_blocks", "remote": "fetched_blocks"},
    "tutti_miss_blocks_total": {"": "miss_blocks"},
    "tutti_not_loaded_blocks_total": {
        "not_worth": "blocks_not_worth_loading",
        "bypassed": "blocks_bypassed",
        "not_worth_fetching": "blocks_not_worth_fetching",
    },
    "tutti_loads_total": {"ok": "loads_ok", "failed": "loads_failed", "cancelled": "loads_cancelled"},
    "tutti_load_blocks_total": {"": "blocks_loaded"},
    "tutti_load_bytes_total": {"": "bytes_loaded"},
    "tutti_load_seconds_total": {"": "load_seconds"},
    "tutti_fetches_total": {"ok": "fetches_ok", "failed": "fetches_failed"},
    "tutti_fetch_blocks_total": {"": "blocks_fetched"},
    "tutti_fetch_bytes_total": {"": "bytes_fetched"},
    "tutti_fetch_seconds_total": {"": "fetch_seconds"},
    "tutti_store_blocks_total": {
        "stored": "blocks_stored",
        "existing": "blocks_already_stored",
        "refused": "blocks_refused",
        "failed": "blocks_store_failed",
        "bypassed": "blocks_store_bypassed",
    },
    "tutti_store_bytes_total": {"": "bytes_stored"},
    "tutti_preemptions_total": {"": "preemptions"},
    "tutti_errors_total": {"": "store_errors"},
}
"""Metric, label value and field of `Counters`."""
OTHERS = ("tutti_evicted_blocks_total", "tutti_served_blocks_total", "tutti_served_bytes_total")
"""Counters that the store and the node keep."""
ALONE: Values = {
    "tutti_cluster_nodes": {"": 0},
    "tutti_cluster_blocks": {"": 0},
    "tutti_directory_stale_seconds": {"": 0},
    "tutti_peers_left_alone": {"": 0},
    "tutti_transport_info": {"tcp": 0, "rdma": 0},
}
"""Gauges of a cluster, for an engine that is in none."""


class TuttiStats(KVConnectorStats):
    """Counters add up, of gauges the latest value counts."""

    def reset(self) -> None:
        """Forgets everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> TuttiStats:
        """Takes in what came after."""
        for name, values in other.data.get("counters", {}).items():
            mine = self.data.setdefault("counters", {}).setdefault(name, {})
            for label, value in values.items():
                mine[label] = mine.get(label, 0) + value
        for kind in ("totals", "gauges"):
            for name, values in other.data.get(kind, {}).items():
                self.data.setdefault(kind, {}).setdefault(name, {}).update(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The interval in one line of vLLM's log."""
        counters = self.data.get("counters", {})

        def of(name: str, label: str = "") -> float:
            return float(counters.get(name, {}).get(label, 0))

        requested, seconds = of("tutti_requested_tokens_total"), of("tutti_load_seconds_total")
        hbm, ssd, remote = (of("tutti_hit_tokens_total", tier) for tier in ("hbm", "ssd", "remote"))
        return {
            "requested tokens": requested,
            "hit rate hbm": round(hbm / requested, 3) if requested else 0.0,
            "hit rate ssd": round(ssd / requested, 3) if requested else 0.0,
            "hit rate remote": round(remote / requested, 3) if requested else 0.0,
            "loaded GB": round(of("tutti_load_bytes_total") / 1e9, 3),
            "load GB/s": round(of("tutti_load_bytes_total") / 1e9 / seconds, 2) if seconds else 0.0,
            "stored GB": round(of("tutti_store_bytes_total") / 1e9, 3),
            "failed loads": of("tutti_loads_total", "failed"),
        }

    def is_empty(self) -> bool:
        """Nothing was counted; gauges alone are not worth a line."""
        return not self.data.get("counters")


class StatsReader:
    """Tells what grew since it was last asked."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._last: dict[str, int | float] = {}
        self._last_totals: Values = {}

    def read(self, gauges: Values, others: Values) -> TuttiStats | None:
        """The growth, and `gauges`; None when nothing grew. `others`: values of `OTHERS`."""
        now = self._counters.as_dict()
        totals: Values = {metric: {label: now[name] for label, name in fields.items()} for metric, fields in _COUNTERS.items()}
        totals |= others
        before, self._last, self._last_totals = self._last_totals, now, totals
        grown: Values = {}
        for metric, values in totals.items():
            for label, value in values.items():
                if growth := value - before.get(metric, {}).get(label, 0):
                    grown.setdefault(metric, {})[label] = growth
        return TuttiStats(data={"counters": grown, "totals": totals, "gauges": gauges}) if grown else None

    def changed(self) -> bool:
        """Whether a counter has changed since the last `read`: a cheap look at each step."""
        return vars(self._counters) != self._last


class TuttiPromMetrics(KVConnectorPromMetrics):
    """Registers `ENGINE_METRICS` with vLLM's labels and adds what the engines report."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        kinds = {"counter": metric_types[Counter], "gauge": metric_types[Gauge]}
        self._metrics: dict[str, Any] = {}
        self._shown: dict[tuple[int, str, str], float] = {}
        for metric in ENGINE_METRICS:
            name = metric.name.removesuffix("_total")  # the library adds it to counters
            self._metrics[metric.name] = kinds[metric.kind](name=name, documentation=metric.help, labelnames=[*labelnames, *metric.labels])
        for engine in per_engine_labelvalues:  # so that each counter is there from the start, at 0
            zeros = {metric: dict.fromkeys(labels, 0) for metric, labels in _COUNTERS.items()}
            self.observe({"totals": {**zeros, **{name: {"": 0} for name in OTHERS}}}, engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes one report in. Counters grow to its totals."""
        for kind in ("totals", "gauges"):
            for name, values in transfer_stats_data.get(kind, {}).items():
                for label, value in values.items():
                    child = self._metrics[name].labels(*self.per_engine_labelvalues[engine_idx], *([label] if label else []))
                    if kind == "gauges":
                        child.set(value)
                        continue
                    child.inc(max(0, value - self._shown.get((engine_idx, name, label), 0)))
                    self._shown[engine_idx, name, label] = value
