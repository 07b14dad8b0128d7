"""Random scenarios on real engines; `scripts/soak scenarios` runs many more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.vllm.checks import needs_windows
from tests.e2e.vllm.scenarios import VARIANTS, Variant, run_seed, start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SEEDS = range(3, 8)
"""Of each variant; among them are such in which loads fail."""


@pytest.mark.parametrize("variant", [pytest.param(v, id=v.name, marks=[needs_windows] if v.model else []) for v in VARIANTS])
def test_answers_are_those_without_a_cache(variant: Variant, tmp_path: Path) -> None:
    engine = start(variant, tmp_path)
    try:
        references: dict[str, dict[str, Any]] = {}
        grown: Counter[str] = Counter()
        for seed in SEEDS:
            grown.update(run_seed(engine, seed, references))
    finally:
        engine.kill()
    assert grown["hit_tokens"] > 0 and grown["blocks_stored"] > 0, "the scenarios don't reach what they are for"
    assert grown["loads_failed"] > 0, "no load failed"
