"""What one vLLM engine's KV bytes mean: the `Geometry` under which they are stored.

Two engines share blocks only if every field agrees, so each field is read from what vLLM really allocated, not from
what was asked for. Set-ups in which equal keys could mean different bytes, or in which keys change with each start,
are refused here with the setting that would help.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from tutti_mooncake import Geometry
from tutti_mooncake.connectors.vllm.model_identity import model_identity
from tutti_mooncake.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

KEPT_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
CACHE_DTYPES = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
TENSOR_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class KvLayout:
    """How one layer holds its blocks: the layout's name, objects per layer, and views for `LocalStore.register`."""

    name: str
    kv_factor: int
    views: tuple[torch.Tensor, ...]


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises `ConfigError` for a set-up whose blocks this connector can't keep."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(f"TuttiConnector keeps KV of tensor-parallel ranks; {name} is {getattr(parallel, name)}, set it to 1")
    if getattr(parallel, "nnodes", 1) != 1 or (parallel.distributed_executor_backend == "ray" and parallel.tensor_parallel_size > 1):
        raise ConfigError(
            "TuttiConnector's ranks share the pool's devices, so they must run on one machine; "
            "use --distributed-executor-backend mp, and one engine per machine"
        )
    groups = kv_cache_config.kv_cache_groups
    for group in groups:
        if type(group.kv_cache_spec) not in KEPT_SPECS:
            names = ", ".join(kind.__name__.removesuffix("Spec") for kind in KEPT_SPECS)
            raise ConfigError(f"TuttiConnector keeps {names}; this model has {type(group.kv_cache_spec).__name__}")
    sizes = {group.kv_cache_spec.block_size for group in groups}
    if len(sizes) != 1:
        raise ConfigError(f"TuttiConnector wants one block size; this model's KV cache groups have {sorted(sizes)}: set --block-size")
    if has_windows(kv_cache_config) and not hasattr(SchedulerOutput, "kv_connector_block_state"):
        raise ConfigError("this vLLM doesn't tell which blocks a sliding window has left; add --disable-hybrid-kv-cache-manager")
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError("calculate_kv_scales makes KV bytes depend on the first request; take the scales from the model")
    hash_seed(cache.prefix_caching_hash_algo)


def check_cluster(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises ConfigError for engines whose blocks can't be fetched by others."""
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        raise ConfigError("etcd: engines of several tensor-parallel ranks can't join a cluster yet; leave etcd empty")
    if len(kv_cache_config.kv_cache_groups) > 1 or has_windows(kv_cache_config):
        raise ConfigError("etcd: models with sliding windows or several KV cache groups can't join a cluster yet; leave etcd empty")


def has_windows(kv_cache_config: KVCacheConfig) -> bool:
    """Whether some layers keep only the latest blocks of a request."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) > 1 or type(groups[0].kv_cache_spec) is SlidingWindowSpec


def hash_seed(algorithm: str, environment: Mapping[str, str] = os.environ, hashes: Any = kv_cache_utils) -> str:
    """The seed of vLLM's block hashes under `algorithm`, as text.

    Raises `ConfigError` when it changes with each process, or when keys aren't 32 bytes long. `hashes` is the module
    that makes vLLM's hashes: releases with a fixed default seed have `DEFAULT_NONE_HASH_SEED` in it, older ones draw
    a random one.
    """
    if not algorithm.startswith("sha256"):
        raise ConfigError(
            f"block hashes by {algorithm} are seeded at random and not collision resistant; "
            "start vLLM with --prefix-caching-hash-algo sha256_cbor"
        )
    seed = environment.get("PYTHONHASHSEED")
    if seed is not None:
        return f"PYTHONHASHSEED={seed}"
    default = getattr(hashes, "DEFAULT_NONE_HASH_SEED", None)
    if default is None:
        raise ConfigError(
            "this vLLM seeds its block hashes at random in each process, so nothing could be found again; "
            "set PYTHONHASHSEED to the same number (0, say) for every engine that shares the pool"
        )
    return str(default)


def cache_dtype(cache_dtype_name: str, tensor_dtype: torch.dtype) -> str:
    """The geometry's name of the KV cache's element type. Raises `ConfigError` for types it doesn't know."""
    if cache_dtype_name in CACHE_DTYPES:
        return CACHE_DTYPES[cache_dtype_name]
    if tensor_dtype in TENSOR_DTYPES:
        return TENSOR_DTYPES[tensor_dtype]
    raise ConfigError(f"KV cache type {cache_dtype_name} ({tensor_dtype}) is not supported; use --kv-cache-dtype auto or fp8")


def kv_layout(tensor: torch.Tensor, blocks: int, block_tokens: int, kv_heads: int, head_dim: int) -> KvLayout:
    """Names the layout of one layer's tensor by its shape and strides, and makes views whose blocks are dense.

    Known shapes, with B blocks, T tokens per block, H heads, D dimensions, in any order of T and H that is dense
    inside a block: `(B, H, T, 2D)` packed, `(B, 2, T, H, D)` paired, `(2, B, T, H, D)` split (two objects per layer),
    and `(B, T, D)` or `(B, 1, T, D)` latent. Raises `ConfigError` for any other.
    """
    shape = tuple(tensor.shape)
    inner = {(kv_heads, block_tokens): "hn", (block_tokens, kv_heads): "nh"}.get(shape[-3:-1], "")
    if kv_heads == 1 and shape in ((blocks, block_tokens, head_dim), (blocks, 1, block_tokens, head_dim)):
        kind, order = "latent", ""
    elif inner and shape[:-3] == (blocks,) and shape[-1] == 2 * head_dim:
        kind, order = "packed", inner
    elif inner and shape[:-3] == (2, blocks) and shape[-1] == head_dim:
        kind, order = "split", inner
    elif inner and shape[:-3] == (blocks, 2) and shape[-1] == head_dim:
        kind, order = "paired", inner
    else:
        raise ConfigError(
            f"unknown KV cache layout: shape {shape}, stride {tensor.stride()}, for {blocks} blocks of {block_tokens} "
            f"tokens, {kv_heads} heads, {head_dim} dimensions"
        )
    if order and tensor.stride(-3) < tensor.stride(-2):
        tensor, order = tensor.transpose(-3, -2), order[::-1]
    views = (tensor[0], tensor[1]) if kind == "split" else (tensor,)
    if not all(view[0].is_contiguous() for view in views):
        raise ConfigError(
            f"a block of the KV cache is not dense (shape {shape}, stride {tensor.stride()}); choose a KV cache "
            "layout in which blocks and layers come before heads and tokens"
        )
    return KvLayout(f"{kind}-{order}d" if order else kind, len(views), views)


def build_geometry(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> tuple[Geometry, list[torch.Tensor], dict[str, int], list[int]]:
    """The engine's geometry; its tensors in the store's order, layer by layer, K before V where they are apart; each layer's index; and
    each tensor's KV cache group.

    `kv_caches`: layer name to tensor, as vLLM registers them. Layers that share another layer's tensor count once.
    """
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    group_of = {name: index for index, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
    layers = unique_layers(kv_caches, group_of)
    layouts = [
        kv_layout(tensor, kv_cache_config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size) for tensor in layers.values()
    ]
    kinds = {(layout.name, str(view.dtype), view[0].numel()) for layout in layouts for view in layout.views}
    if len(kinds) != 1:
        raise ConfigError(f"the KV cache layers differ in layout, type or size: {sorted(kinds)}")
    views = [view for layout in layouts for view in layout.views]
    cache = vllm_config.cache_config
    geometry = Geometry(
        model=model_identity(vllm_config.model_config),
        layers=len(layers),
        kv_factor=layouts[0].kv_factor,
        block_tokens=spec.block_size,
        kv_heads=spec.num_kv_heads * vllm_config.parallel_config.tensor_parallel_size,
        head_dim=spec.head_size,
        dtype=cache_dtype(cache.cache_dtype, views[0].dtype),
        memory_layout=layouts[0].name,
        hash_algorithm=cache.prefix_caching_hash_algo,
        hash_seed=hash_seed(cache.prefix_caching_hash_algo),
        object_bytes=views[0][0].numel() * views[0].element_size(),
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
    )
    order = list(layers)
    index_of = {tensor.data_ptr(): order.index(name) for name, tensor in layers.items()}
    indices = {name: order.index(name) if name in layers else index_of[tensor.data_ptr()] for name, tensor in kv_caches.items()}
    groups = [group_of.get(name, 0) for name in order for _ in range(geometry.kv_factor)]
    return geometry, views, indices, groups


def tensor_parallel_rank(ranks: int) -> int:
    """This worker's rank."""
    return 0 if ranks == 1 else int(get_tensor_model_parallel_rank())


def unique_layers(kv_caches: Mapping[str, torch.Tensor], group_of: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """The layers in the order of their index in the model, without those that show another layer's memory.

    Layers of different KV cache groups may lie in the same memory: they never use the same block of it.
    """
    ordered = sorted(kv_caches.items(), key=lambda item: ([int(part) for part in item[0].split(".") if part.isdigit()], item[0]))
    seen: set[tuple[int, int]] = set()
    layers = {}
    for name, tensor in ordered:
        place = (tensor.data_ptr(), group_of.get(name, 0))
        if place not in seen:
            seen.add(place)
            layers[name] = tensor
    return layers
