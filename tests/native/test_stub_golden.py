"""The native module's interface is the one on record: tutti_mooncake/_native.pyi is what nanobind's stubgen writes.

After a wanted change: scripts/check --update-stubs, and the difference shows in the commit.
"""

import difflib
import sys
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[2] / "tutti_mooncake" / "_native.pyi"


def generated_stub() -> str:
    from nanobind.stubgen import StubGen

    import tutti_mooncake._native as native

    generator = StubGen(native)
    generator.put(native)
    return generator.get()


def test_stub_is_current():
    current, golden = generated_stub(), GOLDEN.read_text() if GOLDEN.exists() else ""
    difference = "\n".join(difflib.unified_diff(golden.splitlines(), current.splitlines(), "_native.pyi", "built module", lineterm="", n=1))
    assert not difference, f"run scripts/check --update-stubs if this is meant:\n{difference}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(f"usage: {Path(__file__).name} --update")
    GOLDEN.write_text(generated_stub())
    print(f"wrote {GOLDEN}")
