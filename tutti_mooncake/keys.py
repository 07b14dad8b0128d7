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
NO_BLOCK = 2**32 - 1
"""In place of an engine block id: layers of this group are not wanted, as behind a sliding window."""

KeyArray = npt.NDArray[np.uint8]
Keys = Sequence[bytes] | KeyArray
BlockIds = Sequence[int] | Sequence[Sequence[int]] | npt.NDArray[np.integer]


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


def as_block_ids(block_ids: BlockIds, keys: int, blocks: int, groups: int = 1, *, holes: bool = False) -> npt.NDArray[np.uint32]:
    """Engine block ids as uint32 of shape (groups, keys), each below `blocks`, or NO_BLOCK where `holes` are allowed. Raises TensorError.

    With one group of layers the ids may be one-dimensional.
    """
    array = np.asarray(block_ids)
    if array.size == 0:
        array = np.zeros((groups, 0) if keys == 0 else array.shape, dtype=np.int64)
    if array.ndim == 1 and groups == 1:
        array = array.reshape(1, -1)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        wanted = "one-dimensional integers" if groups == 1 else f"integers of shape ({groups}, blocks)"
        raise TensorError(f"block_ids must be {wanted}, not {array.dtype} of shape {array.shape}")
    if array.shape[0] != groups:
        raise TensorError(f"block_ids has {array.shape[0]} rows for {groups} groups of layers")
    if array.shape[1] != keys:
        raise TensorError(f"{array.shape[1]} block ids for {keys} keys")
    named = array[array != NO_BLOCK] if holes else array
    if named.size and (int(named.min()) < 0 or int(named.max()) >= blocks):
        wrong = int(named.min()) if int(named.min()) < 0 else int(named.max())
        raise TensorError(f"block id {wrong} is outside the registered tensors, which have {blocks} blocks")
    return np.ascontiguousarray(array, dtype=np.uint32)


def check_distinct(block_ids: npt.NDArray[np.uint32], blocks: int) -> None:
    """Raises TensorError when an engine block (of `blocks`) is named twice: two reads into one block would race."""
    targets = block_ids[block_ids != NO_BLOCK]
    named = np.zeros(blocks, dtype=np.bool_)
    named[targets] = True
    if np.count_nonzero(named) != len(targets):
        raise TensorError("block_ids name the same engine block twice; two reads into one block would race")
