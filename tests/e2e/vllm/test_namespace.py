"""What the connector reads from vLLM's configuration and tensors, without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec, SlidingWindowSpec

from tests.e2e.vllm.tiny_model import make_tiny_model
from tutti_mooncake import ConfigError
from tutti_mooncake.connectors.vllm import namespace
from tutti_mooncake.connectors.vllm.model_identity import directory_digest

B, T, H, D = 7, 16, 4, 8


def in_memory_order(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """A tensor of `shape` whose dimensions lie in memory in `order`."""
    tensor = torch.empty([shape[i] for i in order])
    return tensor.permute([order.index(i) for i in range(len(shape))])


@pytest.mark.parametrize(
    ("tensor", "name", "factor"),
    [
        (torch.empty(B, H, T, 2 * D), "packed-hnd", 1),
        (in_memory_order((B, H, T, 2 * D), (0, 2, 1, 3)), "packed-nhd", 1),
        (torch.empty(2, B, T, H, D), "split-nhd", 2),
        (in_memory_order((2, B, T, H, D), (0, 1, 3, 2, 4)), "split-hnd", 2),
        (in_memory_order((2, B, T, H, D), (1, 0, 2, 3, 4)), "split-nhd", 2),
        (torch.empty(B, 2, T, H, D), "paired-nhd", 1),
        (torch.empty(B, 3, H, T, 2 * D)[:, 1], "packed-hnd", 1),
    ],
)
def test_layout_is_named_by_what_lies_in_memory(tensor: torch.Tensor, name: str, factor: int) -> None:
    layout = namespace.kv_layout(tensor, B, T, H, D)
    assert (layout.name, layout.kv_factor, len(layout.views)) == (name, factor, factor)
    assert all(view[block].is_contiguous() for view in layout.views for block in range(B))


def test_latent_layout() -> None:
    for shape in ((B, T, D), (B, 1, T, D)):
        assert namespace.kv_layout(torch.empty(shape), B, T, 1, D).name == "latent"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(B, H, T, 3 * D),
        torch.empty(4 * B, H, T // 4, 2 * D),
        torch.empty(B, T * H * 2 * D),
        in_memory_order((B, H, T, 2 * D), (1, 0, 2, 3)),
    ],
    ids=["odd width", "blocks split by the kernel", "flat", "heads before blocks"],
)
def test_unknown_layout_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"layout: shape|not dense"):
        namespace.kv_layout(tensor, B, T, H, D)


def test_seed_is_fixed_or_must_be_set() -> None:
    newer = SimpleNamespace(DEFAULT_NONE_HASH_SEED="vllm-none-hash")
    older = SimpleNamespace()
    assert namespace.hash_seed("sha256_cbor", {}, newer) == "vllm-none-hash"
    assert namespace.hash_seed("sha256", {"PYTHONHASHSEED": "0"}, newer) == "PYTHONHASHSEED=0"
    assert namespace.hash_seed("sha256", {"PYTHONHASHSEED": "0"}, older) == "PYTHONHASHSEED=0"
    with pytest.raises(ConfigError, match="set PYTHONHASHSEED"):
        namespace.hash_seed("sha256", {}, older)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_that_collide_are_refused(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="sha256_cbor"):
        namespace.hash_seed(algorithm, {"PYTHONHASHSEED": "0"}, SimpleNamespace(DEFAULT_NONE_HASH_SEED="fixed"))


def spec(kind: type, **more: int) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=kind(**{"block_size": T, "num_kv_heads": H, "head_size": D, "dtype": torch.float32, **more}))


ONE_RANK = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "distributed_executor_backend": "uni",
}


def engine(**parallel: int | str) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**ONE_RANK | parallel),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", calculate_kv_scales=False),
    )


@pytest.mark.parametrize(
    ("vllm_config", "groups", "message"),
    [
        (engine(pipeline_parallel_size=2), [spec(FullAttentionSpec)], "pipeline_parallel_size is 2"),
        (
            engine(distributed_executor_backend="ray", tensor_parallel_size=2),
            [spec(FullAttentionSpec)],
            "one machine",
        ),
        (engine(), [spec(FullAttentionSpec), spec(SlidingWindowSpec, sliding_window=32, block_size=32)], r"\[16, 32\]"),
        (engine(), [spec(FullAttentionSpec), spec(CrossAttentionSpec)], "CrossAttentionSpec"),
    ],
)
def test_unsupported_engine_is_refused(vllm_config: SimpleNamespace, groups: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        namespace.check_supported(vllm_config, SimpleNamespace(kv_cache_groups=groups))
    namespace.check_supported(engine(), SimpleNamespace(kv_cache_groups=[spec(FullAttentionSpec)]))


def test_shared_layers_count_once_and_layers_are_in_the_models_order() -> None:
    first, second = torch.empty(2), torch.empty(2)
    caches = {"model.layers.10.attn": second, "model.layers.2.attn": first, "model.layers.11.attn": second}
    assert list(namespace.unique_layers(caches, {})) == ["model.layers.2.attn", "model.layers.10.attn"]
    groups = {"model.layers.2.attn": 0, "model.layers.10.attn": 0, "model.layers.11.attn": 1}
    assert len(namespace.unique_layers(caches, groups)) == 3, "layers of two groups may lie in the same memory"


def test_model_with_other_weights_has_another_identity(tmp_path: Path) -> None:
    one = make_tiny_model(tmp_path / "one", seed=0)
    copy = make_tiny_model(tmp_path / "copy", seed=0)
    other = make_tiny_model(tmp_path / "other", seed=1)
    assert directory_digest(one) == directory_digest(copy)
    assert directory_digest(one) != directory_digest(other)


def test_one_changed_tensor_changes_the_identity(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    before = directory_digest(model)
    with (model / "model.safetensors").open("r+b") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        stream.seek(8 + header_bytes + 2)
        byte = stream.read(1)[0]
        stream.seek(8 + header_bytes + 2)
        stream.write(bytes([byte ^ 1]))
    assert directory_digest(model) != before
