"""KV events in vLLM's schema: which blocks the store has taken in and lost, medium STORAGE, for routers and indexes.

vLLM publishes them with its own, in order and with its sequence numbers. Blocks that were in the pool before the engine started are not
announced: their tokens aren't known any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils

from tutti_mooncake.keys import KeyArray

if TYPE_CHECKING:
    from vllm.v1.request import Request

MEDIUM = "STORAGE"


class Events:
    """Waiting events. `removed` may be called from any thread. `unsalt`: stored keys to the engine's block hashes."""

    def __init__(self, block_tokens: int, unsalt: Callable[[KeyArray], KeyArray]) -> None:
        self._block_tokens = block_tokens
        self._unsalt = unsalt
        self._lock = threading.Lock()
        self._waiting: list[KVCacheEvent] = []

    def stored(self, request: Request, begin: int, end: int) -> None:
        """Blocks `[begin, end)` of a request's chain can be found from now on."""
        hashes, size = request.block_hashes, self._block_tokens
        event = BlockStored(
            block_hashes=[_external(key) for key in hashes[begin:end]],
            parent_block_hash=_external(hashes[begin - 1]) if begin else None,
            token_ids=list(request.all_token_ids[begin * size : end * size]),
            block_size=size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            extra_keys=_extra_keys(request, begin, end, size),
            group_idx=0,
            locality="LOCAL",
        )
        with self._lock:
            self._waiting.append(event)

    def removed(self, keys: KeyArray) -> None:
        """These (salted) keys can't be found any more."""
        hashes = [_external(key.tobytes()) for key in self._unsalt(np.ascontiguousarray(keys))]
        with self._lock:
            self._waiting.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM, group_idx=0, locality="LOCAL"))

    def take(self) -> Sequence[KVCacheEvent]:
        """All of them, once."""
        with self._lock:
            events, self._waiting = self._waiting, []
            return events


def _external(key: bytes) -> Any:
    return kv_cache_utils.maybe_convert_block_hash(kv_cache_utils.BlockHash(bytes(key)))


def _extra_keys(request: Request, begin: int, end: int, size: int) -> list[tuple[Any, ...] | None] | None:
    if not request.mm_features and request.cache_salt is None:
        return None
    keys, image = [], 0
    for block in range(end):
        extra, image = kv_cache_utils.generate_block_hash_extra_keys(request, block * size, (block + 1) * size, image)
        keys.append(extra)
    untag = getattr(kv_cache_utils, "to_event_extra_keys", list)
    found: list[tuple[Any, ...] | None] = untag(keys[begin:end])
    return found
