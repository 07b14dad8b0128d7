"""Every metric that is exported, by name: what dashboards, alerts and documents may use.

A counter's name ends in `_total`. Hits have their denominator under the same labels: over the tiers, hits and misses sum up to what was
requested, in tokens and in blocks, when a request has been settled (admitted without a load, or its load over).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric; `labels` besides those of the engine."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


ENGINE_METRICS = (
    Metric("tutti_requests_total", "counter", "Requests settled."),
    Metric("tutti_requested_tokens_total", "counter", "Prompt tokens of settled requests: the denominator of tutti_hit_tokens_total."),
    Metric(
        "tutti_hit_tokens_total", "counter", "Prompt tokens that weren't computed, by where their KV was: hbm, ssd or remote.", ("tier",)
    ),
    Metric("tutti_miss_tokens_total", "counter", "Prompt tokens that were computed."),
    Metric("tutti_requested_blocks_total", "counter", "Full blocks of settled prompts: the denominator of tutti_hit_blocks_total."),
    Metric("tutti_hit_blocks_total", "counter", "Full blocks that weren't computed, by where their KV was: hbm, ssd or remote.", ("tier",)),
    Metric("tutti_miss_blocks_total", "counter", "Full blocks that were computed."),
    Metric(
        "tutti_not_loaded_blocks_total",
        "counter",
        "Blocks that could be had and were computed: not_worth, bypassed or not_worth_fetching.",
        ("reason",),
    ),
    Metric("tutti_loads_total", "counter", "Loads that ended: ok, failed (in part or whole) or cancelled.", ("result",)),
    Metric("tutti_load_blocks_total", "counter", "Blocks loaded well."),
    Metric("tutti_load_bytes_total", "counter", "Bytes loaded well."),
    Metric("tutti_load_seconds_total", "counter", "Duration of loads, summed."),
    Metric("tutti_fetches_total", "counter", "Fetches from other nodes that ended: ok or failed (in part or whole).", ("result",)),
    Metric("tutti_fetch_blocks_total", "counter", "Blocks fetched well."),
    Metric("tutti_fetch_bytes_total", "counter", "Bytes fetched well."),
    Metric("tutti_fetch_seconds_total", "counter", "Duration of fetches, summed."),
    Metric("tutti_store_blocks_total", "counter", "Blocks offered: stored, existing, refused, failed or bypassed.", ("result",)),
    Metric("tutti_store_bytes_total", "counter", "Bytes stored."),
    Metric("tutti_preemptions_total", "counter", "Times that a request's blocks were taken away before it had ended."),
    Metric("tutti_errors_total", "counter", "Calls to the store that raised; each was treated as a miss."),
    Metric("tutti_breaker_state", "gauge", "0 closed, 1 half open, 2 open; of loads or stores.", ("of",)),
    Metric("tutti_resident_blocks", "gauge", "Blocks in the pool."),
    Metric("tutti_capacity_blocks", "gauge", "Blocks that the pool holds at most."),
    Metric("tutti_evicted_blocks_total", "counter", "Blocks removed to make room."),
    Metric("tutti_cluster_nodes", "gauge", "Nodes that are alive, this one among them; 0 when the engine is alone."),
    Metric("tutti_cluster_blocks", "gauge", "Distinct blocks that other nodes and this one have announced."),
    Metric("tutti_directory_stale_seconds", "gauge", "Since etcd was last heard of."),
    Metric("tutti_peers_left_alone", "gauge", "Nodes whose breaker is open."),
    Metric("tutti_transport_info", "gauge", "1 for what really moves blocks between nodes: tcp or rdma.", ("protocol",)),
    Metric("tutti_served_blocks_total", "counter", "Blocks sent to other nodes."),
    Metric("tutti_served_bytes_total", "counter", "Bytes of those blocks."),
    Metric("tutti_pins", "gauge", "Pins held: 0 when no request waits for a load."),
)
