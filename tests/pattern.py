"""Pattern blocks: KV whose bytes are derived from the block's key, so that a reader alone can tell any mix-up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from tutti_mooncake import Geometry, _native


def geometry(**changes: object) -> Geometry:
    """A small model: 4 objects of 4 KiB per block unless changed."""
    values: dict[str, object] = {
        "model": "pattern",
        "layers": 4,
        "kv_factor": 1,
        "block_tokens": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "dtype": "float32",
        "memory_layout": "packed-hnd",
        "hash_algorithm": "sha256_cbor",
        "hash_seed": "fixed",
    }
    return Geometry(**{**values, **changes})  # type: ignore[arg-type]


def device_of(executor: str) -> str:
    """Where an executor's tensors are, as torch names it."""
    return "cuda" if executor == "uring-gpu" or (executor == "nvme-model" and not _native.probe_cuda()) else "cpu"


def chain(name: object, blocks: int, shared: Sequence[bytes] = ()) -> list[bytes]:
    """`blocks` chained keys that begin with `shared`."""
    keys = list(shared[:blocks])
    while len(keys) < blocks:
        previous = keys[-1] if keys else b""
        keys.append(hashlib.sha256(previous + repr((name, len(keys))).encode()).digest())
    return keys


class PatternTensors:
    """KV tensors of one rank with `blocks` engine blocks; `align_offset` bytes off a 4 KiB boundary."""

    def __init__(self, geometry: Geometry, blocks: int, align_offset: int = 0, rank: int = 0, device: str = "cpu") -> None:
        self.geometry = geometry
        self.rank = rank
        self.blocks = blocks
        size = geometry.objects_per_block * blocks * geometry.object_bytes
        self._memory = torch.zeros(size + 8192, dtype=torch.uint8, device=device)
        start = -self._memory.data_ptr() % 4096 + align_offset
        shape = (geometry.objects_per_block, blocks, geometry.object_bytes)
        self._view = self._memory[start : start + size].view(shape)
        self.tensors = [self._view[index] for index in range(geometry.objects_per_block)]

    def _pattern(self, key: bytes) -> torch.Tensor:
        seed = int.from_bytes(hashlib.sha256(b"pattern%d" % self.rank + key).digest()[:8], "little")
        shape = (self.geometry.objects_per_block, self.geometry.object_bytes)
        return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).to(self._memory.device)

    def write(self, keys: Iterable[bytes], first: int = 0) -> None:
        """Fills engine blocks first, first+1, ... with the keys' patterns."""
        for position, key in enumerate(keys):
            self._view[:, first + position] = self._pattern(key)

    def wipe(self, first: int = 0, blocks: int | None = None) -> None:
        """Fills engine blocks with 0xEE."""
        self._view[:, first : None if blocks is None else first + blocks] = 0xEE

    def holds(self, key: bytes, block: int) -> bool:
        """Whether an engine block is exactly the key's pattern."""
        return bool(torch.equal(self._view[:, block], self._pattern(key)))

    def object(self, index: int, block: int) -> torch.Tensor:
        """One object's bytes."""
        return self._view[index, block]
