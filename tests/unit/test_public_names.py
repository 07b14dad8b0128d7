"""The public names are those that docs/api.md describes, no more and no fewer."""

import re
from pathlib import Path

import tutti_mooncake

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"


def documented_names() -> set[str]:
    """Every capitalised identifier that a code span of api.md names and that could be one of ours.

    A page's headings, the words `Result: ...` of its tables and its exception lists all write a public name as a code
    span that begins with it, so the code spans are the one place to look.
    """
    text = re.sub(r"```.*?```", "", API.read_text(), flags=re.S)
    names: set[str] = set()
    for span in re.findall(r"`([^`]+)`", text):
        names.update(re.findall(r"(?<![\w.\"'])[A-Z][A-Za-z]*[a-z][A-Za-z]*\b", span))
    return names - {"None", "True", "False", "Iterator", "TimeoutError", "Timeout", "Cancelled"}


def test_all_lists_what_exists():
    for name in tutti_mooncake.__all__:
        assert hasattr(tutti_mooncake, name), f"__all__ lists {name}, which isn't there"
    assert len(set(tutti_mooncake.__all__)) == len(tutti_mooncake.__all__)


def test_every_documented_name_is_public():
    missing = documented_names() - set(tutti_mooncake.__all__)
    assert not missing, f"docs/api.md describes {sorted(missing)}, which tutti_mooncake doesn't export"


def test_every_public_name_is_documented():
    undocumented = {name for name in tutti_mooncake.__all__ if not name.startswith("__")} - documented_names()
    assert not undocumented, f"tutti_mooncake exports {sorted(undocumented)}, which docs/api.md doesn't describe"
