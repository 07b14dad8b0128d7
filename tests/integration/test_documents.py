"""What the documents show runs as it stands there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from tutti_mooncake import StoreConfig
from tutti_mooncake.config import ClusterConfig, EngineConfig
from tutti_mooncake.metrics import ENGINE_METRICS


def test_the_example_of_the_python_interface(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    for hits in (0, 8):  # the second run finds what the first one stored
        exec(example.replace("/mnt/nvme0/tutti", str(tmp_path / "tutti")), names)
        assert names["hit"] == hits


def test_documents_name_every_metric_and_option_and_no_other() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "vllm.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\| `(tutti_\w+)` \| (?:counter|gauge)", text)) == {metric.name for metric in ENGINE_METRICS}
    for kind, name in ((EngineConfig, "vllm.md"), (ClusterConfig, "cluster.md")):
        text = (docs / name).read_text(encoding="utf-8")
        for field in fields(kind):
            default = str(field.default).removesuffix(".0") or "empty"
            assert re.search(rf"\| `{field.name}` \| `?{default}`? \|", text), f"{field.name} or its default {default} isn't in docs/{name}"
    api = (docs / "api.md").read_text(encoding="utf-8")
    for field in fields(StoreConfig):
        assert f"| `{field.name}` |" in api, f"{field.name} isn't in docs/api.md"
