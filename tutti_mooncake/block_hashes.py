"""vLLM's chained block hashes, made without vLLM: what a prompt's blocks are called in the store.

The hash of a block is the hash of (parent's hash, the block's token ids, extra keys); that of the first block's parent comes from the
seed. Source: vLLM's `v1/core/kv_cache_utils.py` and `utils/hashing.py`, against which the tests compare.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cbor2

from tutti_mooncake.errors import ConfigError


def block_hashes(
    tokens: Sequence[int], block_tokens: int, algorithm: str, seed: str, cache_salt: str = "", *, tagged_salt: bool = True
) -> list[bytes]:
    """The hashes (32 bytes each) of the full blocks of a prompt of `tokens`.

    `algorithm`, `seed`: as in `Geometry.hash_algorithm` and `hash_seed`. `tagged_salt`: False as releases before 0.32 hash a salt.
    Raises ConfigError for an algorithm that it doesn't know.
    """
    digest = _digest(algorithm)
    parent = digest(seed.removeprefix("PYTHONHASHSEED="))
    hashes: list[bytes] = []
    for begin in range(0, len(tokens) - block_tokens + 1, block_tokens):
        extra: tuple[Any, ...] | None = None
        if begin == 0 and cache_salt:
            extra = (("cache_salt", cache_salt),) if tagged_salt else (cache_salt,)
        parent = digest((parent, tuple(int(token) for token in tokens[begin : begin + block_tokens]), extra))
        hashes.append(parent)
    return hashes


def _digest(algorithm: str) -> Callable[[Any], bytes]:
    if algorithm == "sha256":
        return lambda value: hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()
    if algorithm == "sha256_cbor":
        return lambda value: hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()
    raise ConfigError(f"block hashes by {algorithm!r} can't be made here; known: sha256, sha256_cbor")
