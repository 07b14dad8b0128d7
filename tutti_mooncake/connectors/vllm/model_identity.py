"""Names a model so that two models with different weights never share a name.

A model from a hub is its id and commit. A local directory is its name and a digest of its content: every byte of
`config.json`, and of each weight file the name, the size, the header and the beginning of every tensor, so that a
fine-tuned copy under the old path gets another name, at the price of a few thousand small reads.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
TENSOR_SAMPLE_BYTES = 4096
FILE_SAMPLES = 256
MAX_HEADER_BYTES = 100 << 20


def model_identity(model_config: Any) -> str:
    """`name@revision` of vLLM's `ModelConfig`, and what else changes KV bytes: quantization and configuration
    overrides.
    """
    path = Path(model_config.model)
    if path.is_dir():
        name = f"{path.resolve().name}@{directory_digest(path)}"
    else:
        commit = getattr(model_config.hf_config, "_commit_hash", None)
        name = f"{model_config.model}@{commit or model_config.revision or 'main'}"
    if model_config.quantization:
        name += f";quantization={model_config.quantization}"
    overrides = getattr(model_config, "hf_overrides", None)
    if overrides:
        text = json.dumps(overrides, sort_keys=True, default=str) if isinstance(overrides, dict) else repr(overrides)
        name += f";overrides={hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return name


def directory_digest(path: Path) -> str:
    """32 hexadecimal digits over the configuration and the weights in `path`."""
    digest = hashlib.sha256()
    config = path / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for file in sorted(path.iterdir()):
        if file.is_file() and file.suffix in WEIGHT_SUFFIXES:
            digest.update(f"{file.name}:{file.stat().st_size}".encode())
            _add_samples(digest, file)
    return digest.hexdigest()[:32]


def _add_samples(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        offsets = _safetensors_offsets(stream.read(8), stream, size) if file.suffix == ".safetensors" else None
        if offsets is None:
            step = max(TENSOR_SAMPLE_BYTES, size // FILE_SAMPLES)
            offsets = [*range(0, size, step), max(0, size - TENSOR_SAMPLE_BYTES)]
        for offset in offsets:
            stream.seek(offset)
            digest.update(stream.read(TENSOR_SAMPLE_BYTES))


def _safetensors_offsets(length_field: bytes, stream: Any, size: int) -> list[int] | None:
    """File offsets of all tensors, in order, the header's own first; `None` when this isn't a safetensors file."""
    if len(length_field) != 8:
        return None
    (length,) = struct.unpack("<Q", length_field)
    if length > min(size - 8, MAX_HEADER_BYTES):
        return None
    try:
        header = json.loads(stream.read(length))
        begins = [tensor["data_offsets"][0] for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return [0, *(8 + length + begin for begin in sorted(begins))]
