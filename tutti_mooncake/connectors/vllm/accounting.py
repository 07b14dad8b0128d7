"""Settles requests: once each, when it is known where the KV of its prompt came from. Counts, notes and spans are all made here.

A request is settled when it is admitted without a load, or when its first load is over. Of its prompt tokens every one is a hit in vLLM's
own cache, a hit in the store, a hit on another node, or a miss.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tutti_mooncake.connectors.vllm.counters import Counters
from tutti_mooncake.connectors.vllm.spans import Spans
from tutti_mooncake.store.request_log import RequestLog, RequestNote

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class Finding:
    """What the last lookup of a request found: `local_tokens` in vLLM's own cache, `found` leading blocks in the store, `elsewhere` more
    behind them on another node, `why` the store's blocks aren't loaded (empty: they are, or there are none).
    """

    local_tokens: int = 0
    found: int = 0
    why: str = ""
    elsewhere: int = 0


class Accounting:
    """Called from vLLM's scheduler thread."""

    def __init__(self, counters: Counters, log: RequestLog, spans: Spans, block_tokens: int) -> None:
        self._counters = counters
        self._log = log
        self._spans = spans
        self._block_tokens = block_tokens

    def settle(
        self, request: Request, finding: Finding, *, loaded: int = 0, fetched: int = 0, failed: int = 0, cancelled: bool = False
    ) -> None:
        """`loaded` blocks came from the store and `fetched` ones from another node; of `failed` that was tried in vain."""
        counters, size = self._counters, self._block_tokens
        prompt = request.num_prompt_tokens
        local = min(finding.local_tokens, prompt)
        hit = min(loaded * size, prompt - local)
        full = prompt // size
        local_blocks = local // size
        hit_blocks = min(loaded, full - local_blocks)
        fetched_tokens = min(fetched * size, prompt - local - hit)
        fetched_blocks = min(fetched, full - local_blocks - hit_blocks)
        counters.requests += 1
        counters.requested_tokens += prompt
        counters.local_hit_tokens += local
        counters.hit_tokens += hit
        counters.fetched_tokens += fetched_tokens
        counters.miss_tokens += prompt - local - hit - fetched_tokens
        counters.requested_blocks += full
        counters.local_hit_blocks += local_blocks
        counters.hit_blocks += hit_blocks
        counters.fetched_blocks += fetched_blocks
        counters.miss_blocks += full - local_blocks - hit_blocks - fetched_blocks
        keys = request.block_hashes
        missing = bytes(keys[finding.found])[:8].hex() if finding.found < min(full, len(keys)) else ""
        why = "the request ended first" if cancelled else finding.why
        self._log.add(
            RequestNote(
                id=request.request_id,
                time=int(time.time()),
                prompt=prompt,
                full=full,
                hbm=local_blocks,
                found=min(finding.found, full),
                loaded=hit_blocks,
                failed=failed,
                why=why,
                missing=missing,
                elsewhere=finding.elsewhere,
                fetched=fetched_blocks,
            )
        )

    def load_ended(self, request: Request, seconds: float, blocks: int, ok_blocks: int, moved_bytes: int, *, layerwise: bool) -> None:
        """A load is over, for a trace."""
        self._spans.load(
            request,
            seconds,
            {"tutti.blocks": blocks, "tutti.blocks_ok": ok_blocks, "tutti.bytes": moved_bytes, "tutti.layerwise": layerwise},
        )
