"""What the documents show runs as it stands there."""

from __future__ import annotations

from pathlib import Path


def test_the_example_of_the_python_interface(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    for hits in (0, 8):  # the second run finds what the first one stored
        exec(example.replace("/mnt/nvme0/tutti", str(tmp_path / "tutti")), names)
        assert names["hit"] == hits
