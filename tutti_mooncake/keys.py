"""Block keys: the engine's chained block hashes, 32 bytes each.

A tenant salt turns keys into others of the same size, so that tenants who don't share a salt can't find each other's blocks: the key
is XORed with a mask derived from the salt, which keeps different keys different and costs nothing per block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tutti_mooncake.errors import KeyFormatError, TensorError

KEY_BYTES = 32

KeyArray = npt.NDArray[np.uint8]
Keys = Sequence[bytes] | KeyArray
BlockIds = Sequence[int] | npt.NDArray[np.integer]


def as_key_array(keys: Keys, mask: KeyArray | None = None) -> KeyArray:
    """Keys as a contiguous uint8 array of shape (n, 32), salted by `mask`. Raises KeyFormatError."""
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
            raise KeyFormatError(f"keys must be uint8 of shape (n, {KEY_BYTES}), not {keys.dtype} of shape {keys.shape}")
        array = np.ascontiguousarray(keys)
    else:
        for position, key in enumerate(keys):
            if not isinstance(key, bytes) or len(key) != KEY_BYTES:
                size = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
                raise KeyFormatError(
                    f"keys[{position}] is {size}; block keys are {KEY_BYTES} bytes (use a sha256 block hash, or hash yours with sha256)"
                )
        array = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, KEY_BYTES)
    return array if mask is None else array ^ mask


def salt_mask(salt: str) -> KeyArray | None:
    """The mask of a tenant salt; None for the empty salt."""
    if not salt:
        return None
    return np.frombuffer(hashlib.sha256(b"tutti tenant salt\0" + salt.encode()).digest(), dtype=np.uint8)


def as_block_ids(block_ids: BlockIds, keys: int, blocks: int) -> npt.NDArray[np.uint32]:
    """Engine block ids as uint32 of shape (keys,), each below `blocks`. Raises TensorError."""
    array = np.asarray(block_ids)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TensorError(f"block_ids must be one-dimensional integers, not {array.dtype} of shape {array.shape}")
    if len(array) != keys:
        raise TensorError(f"{len(array)} block ids for {keys} keys")
    if len(array) and (int(array.min()) < 0 or int(array.max()) >= blocks):
        wrong = int(array.min()) if int(array.min()) < 0 else int(array.max())
        raise TensorError(f"block id {wrong} is outside the registered tensors, which have {blocks} blocks")
    return np.ascontiguousarray(array, dtype=np.uint32)
