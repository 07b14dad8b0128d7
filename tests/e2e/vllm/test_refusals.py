"""Set-ups that an engine refuses to start with, and what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.vllm.conftest import CAPACITY, StartEngine
from tutti_mooncake import Geometry, LocalStore, StoreConfig
from tutti_mooncake.demo.engine_client import EngineFailed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def test_pool_of_another_model_is_refused_with_both_fingerprints(start_engine: StartEngine, pool: Path) -> None:
    theirs = Geometry(
        model="another-model",
        layers=4,
        kv_factor=1,
        block_tokens=64,
        kv_heads=4,
        head_dim=64,
        dtype="float32",
        memory_layout="packed-nhd",
        hash_algorithm="sha256",
        hash_seed="vllm-none-hash",
    )
    LocalStore.open(StoreConfig(devices=[str(pool)], capacity=CAPACITY), theirs).close()
    with pytest.raises(EngineFailed, match="NamespaceMismatch") as refusal:
        start_engine()
    said = str(refusal.value)
    fingerprints = re.search(r"namespace ([0-9a-f]+), this engine has ([0-9a-f]+)", said)
    assert fingerprints is not None and fingerprints[1] == theirs.fingerprint() != fingerprints[2]
    for field in ("model", "block_tokens", "memory_layout"):
        assert field in said.rsplit("NamespaceMismatch", 1)[1]
    assert "packed-hnd" in said and "packed-nhd" in said


def test_random_hashes_are_refused(start_engine: StartEngine) -> None:
    with pytest.raises(EngineFailed, match="--prefix-caching-hash-algo sha256_cbor"):
        start_engine(prefix_caching_hash_algo="xxhash")
