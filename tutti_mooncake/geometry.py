"""What one engine block's KV looks like, and the namespace that it belongs to.

An object is the contiguous run that the engine keeps for one layer of one block on one rank; a block has kv_factor*layers objects.
The namespace's fingerprint covers every field that changes the meaning of the bytes; a store never serves one namespace's bytes in
another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tutti_mooncake.errors import ConfigError

FORMAT_VERSION = 1

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "uint8": 1}


@dataclass(frozen=True)
class Geometry:
    """KV of one block. See docs/api.md for the fields. Raises ConfigError for values that can't be."""

    model: str
    layers: int
    kv_factor: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: str
    memory_layout: str
    hash_algorithm: str
    hash_seed: str
    object_bytes: int = 0
    tp_size: int = 1
    pp_layout: str = "1"

    def __post_init__(self) -> None:
        for name in ("layers", "block_tokens", "kv_heads", "head_dim", "tp_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"geometry.{name} must be a positive integer, not {getattr(self, name)!r}")
        if self.kv_factor not in (1, 2):
            raise ConfigError(f"geometry.kv_factor must be 1 (K and V packed) or 2 (apart), not {self.kv_factor!r}")
        if self.dtype not in ELEMENT_BYTES:
            raise ConfigError(f"geometry.dtype {self.dtype!r} is unknown; known: {', '.join(ELEMENT_BYTES)}")
        if self.object_bytes == 0:
            if self.kv_heads % self.tp_size:
                raise ConfigError(f"geometry: {self.kv_heads} KV heads can't be split over {self.tp_size} ranks; give object_bytes")
            width = self.head_dim * (2 if self.kv_factor == 1 else 1)
            size = self.block_tokens * (self.kv_heads // self.tp_size) * width * ELEMENT_BYTES[self.dtype]
            object.__setattr__(self, "object_bytes", size)
        if not 0 < self.object_bytes < 1 << 31:
            raise ConfigError(f"geometry.object_bytes must be between 1 and 2 GiB, not {self.object_bytes}")

    @property
    def objects_per_block(self) -> int:
        """Objects of one block on one rank."""
        return self.kv_factor * self.layers

    @property
    def payload_bytes_per_block(self) -> int:
        """Bytes of one block over all ranks, without padding."""
        return self.objects_per_block * self.object_bytes * self.tp_size

    def as_dict(self) -> dict[str, Any]:
        """Fields by name, as they stand in the superblock."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Geometry:
        """The inverse of as_dict; fields of other versions are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def fingerprint(self) -> str:
        """Hex digest over every field and the format version: the namespace."""
        text = json.dumps({"format_version": FORMAT_VERSION, **self.as_dict()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def namespace_id(self) -> bytes:
        """The fingerprint as 16 bytes: blocks are of use to each other's engines only where it is the same."""
        return bytes.fromhex(self.fingerprint())

    def differences(self, other: Geometry) -> list[str]:
        """`field: ours != theirs` for each field that differs."""
        mine, theirs = self.as_dict(), other.as_dict()
        return [f"{name}: {mine[name]!r} != {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]
