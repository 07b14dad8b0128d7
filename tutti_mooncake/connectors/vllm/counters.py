"""Counts of what the connector did, kept by the scheduler half.

The denominator of a hit rate is `requested_tokens`: every prompt token of every settled request, cached or not:
`local_hit_tokens + hit_tokens + fetched_tokens + miss_tokens == requested_tokens` at any time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Monotonic counters; tokens and blocks are vLLM's."""

    requests: int = 0
    """Requests settled: it is known where their prompt's KV came from."""
    requested_tokens: int = 0
    """Prompt tokens of those requests, each counted once."""
    local_hit_tokens: int = 0
    """Of these, found in vLLM's own prefix cache at admission."""
    hit_tokens: int = 0
    """Of these, loaded from the store, and loaded well."""
    fetched_tokens: int = 0
    """Of these, fetched from other nodes, and fetched well."""
    miss_tokens: int = 0
    """Of these, computed."""
    requested_blocks: int = 0
    """Full blocks of those prompts; the four counters below are as those of tokens."""
    local_hit_blocks: int = 0
    hit_blocks: int = 0
    fetched_blocks: int = 0
    miss_blocks: int = 0
    preemptions: int = 0
    """Times that vLLM took a request's blocks away before it had ended."""
    loads: int = 0
    """Loads that ended."""
    loads_ok: int = 0
    """Loads of which every block arrived."""
    loads_layerwise: int = 0
    """Loads for which each layer waited in the step that computed the rest."""
    loads_failed: int = 0
    """Loads of which at least one block failed and was computed again."""
    loads_cancelled: int = 0
    """Loads whose request ended before they did."""
    blocks_loaded: int = 0
    """Blocks that arrived whole."""
    bytes_loaded: int = 0
    """Bytes of those blocks."""
    blocks_not_worth_loading: int = 0
    """Blocks that were found and are faster to compute."""
    blocks_bypassed: int = 0
    """Blocks that were found while the breaker of loads was open."""
    load_seconds: float = 0.0
    """Time from submission to end, summed over loads."""
    fetches: int = 0
    """Fetches from other nodes that ended; each is a part of a load."""
    fetches_ok: int = 0
    """Fetches of which every block arrived."""
    fetches_failed: int = 0
    """Fetches of which at least one block failed and was computed."""
    blocks_fetched: int = 0
    """Blocks that arrived whole from other nodes."""
    bytes_fetched: int = 0
    """Bytes of those blocks."""
    fetch_seconds: float = 0.0
    """Time from the beginning to the end of fetches, summed."""
    blocks_not_worth_fetching: int = 0
    """Blocks that another node held and that are faster to compute."""
    blocks_stored: int = 0
    """Blocks that this engine made durable."""
    bytes_stored: int = 0
    """Bytes of those blocks."""
    blocks_already_stored: int = 0
    """Blocks that were in the store when they were offered."""
    blocks_refused: int = 0
    """Blocks that the store's policy did not take; not an error."""
    blocks_store_failed: int = 0
    """Blocks whose store failed, ran out of time or was cancelled."""
    blocks_store_bypassed: int = 0
    """Blocks that were not offered, since the breaker of stores was open."""
    store_errors: int = 0
    """Calls to the store that raised; each was treated as a miss."""

    def as_dict(self) -> dict[str, int | float]:
        """A copy by name, for logs and reports."""
        return dict(vars(self))
