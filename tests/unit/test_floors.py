"""A module imports only from its own floor's sub-package and from lower floors; engines and clusters stay at the edges.

The table is the one of docs/architecture.md. A new sub-package must be entered here before it can be imported.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "tutti_mooncake"

FLOORS = {
    "geometry": 0,
    "keys": 0,
    "block_hashes": 0,
    "config": 0,
    "errors": 0,
    "metrics": 0,
    "_native": 0,
    "io": 1,
    "store": 2,
    "schedule": 2,
    "remote": 3,
    "directory": 3,
    "agent": 4,
    "connectors": 5,
    "serve": 6,
    "cli": 7,
    "bench": 7,
    "report": 7,
    "demo": 7,
    "deploy": 7,
}

# First floor from which an edge may be imported, and sub-packages above it that must not.
EDGES = {
    "vllm": (5, {"serve"}),
    "ray": (6, set()),
    "etcd3": (3, {"connectors", "serve"}),
    "mooncake": (3, {"serve"}),
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def box_of(path: Path) -> str | None:
    """Sub-package or floor-0 module that a file belongs to; None for the package's own __init__."""
    relative = path.relative_to(PACKAGE)
    name = relative.parts[0].removesuffix(".py")
    return None if name == "__init__" else name


def imported_names(path: Path) -> list[tuple[int, str]]:
    """Absolute names of what a file imports, at any depth of its syntax tree, with line numbers."""
    module = ("tutti_mooncake", *path.relative_to(PACKAGE).with_suffix("").parts)
    package = module[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
    return found


def top_level_floor() -> int:
    """The floor of `import tutti_mooncake` itself: that of the highest sub-package whose names it gives."""
    parts = [name.split(".") for _, name in imported_names(PACKAGE / "__init__.py")]
    return max((FLOORS[part[1]] for part in parts if part[0] == "tutti_mooncake"), default=0)


def violations(path: Path) -> list[str]:
    box = box_of(path)
    if box is None:
        return []
    if box not in FLOORS:
        return [f"{path.relative_to(PACKAGE.parent)}: {box!r} has no floor in {Path(__file__).name}"]
    floor = FLOORS[box]
    wrong = []
    for line, name in imported_names(path):
        where = f"{path.relative_to(PACKAGE.parent)}:{line}"
        parts = name.split(".")
        if parts[0] == "tutti_mooncake":
            other = parts[1] if len(parts) > 1 else ""
            if other == box:
                continue
            if other not in FLOORS:
                if floor <= top_level_floor():
                    wrong.append(f"{where}: imports {name} from the package's top level")
            elif FLOORS[other] > floor or (FLOORS[other] == floor and floor not in (0, 2, 7)):
                wrong.append(f"{where}: {box} (floor {floor}) imports {name} (floor {FLOORS[other]})")
        elif parts[0] in EDGES:
            first, barred = EDGES[parts[0]]
            if floor < first or box in barred:
                wrong.append(f"{where}: {box} (floor {floor}) imports {parts[0]}")
    return wrong


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    assert violations(path) == []


def test_it_sees_every_form_of_import(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "tutti_mooncake")
    file = tmp_path / "tutti_mooncake" / "store" / "bad.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "tutti_mooncake" / "__init__.py").write_text("from tutti_mooncake.store import LocalStore\n")
    file.write_text(
        "import vllm.config\n"
        "from ray import serve\n"
        "from tutti_mooncake.cli import main\n"
        "from ..connectors import vllm\n"
        "from .. import serve\n"
        "from .pool import Pool\n"
        "from tutti_mooncake import LocalStore\n"
        "def later():\n"
        "    import etcd3\n"
    )
    lines = [int(text.split(":")[1]) for text in violations(file)]
    assert sorted(lines) == [1, 2, 3, 4, 5, 7, 9]
