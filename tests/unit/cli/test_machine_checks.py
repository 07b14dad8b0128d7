"""Findings of `tutti doctor` about the machine."""

import pytest

from tutti_mooncake.cli import machine_checks


@pytest.mark.parametrize(("release", "state"), [("5.10.0-28-amd64", "warn"), ("5.15.0", "ok"), ("6.1.0-13-amd64", "ok")])
def test_kernel(release, state):
    assert machine_checks.kernel(release).state == state


@pytest.mark.parametrize(
    ("version", "seed", "state"),
    [
        ("0.26.0", None, "warn"),
        ("0.26.0", "random", "warn"),
        ("0.26.0", "0", "ok"),
        ("0.32.0", None, "ok"),
        ("1.0", None, "ok"),
    ],
)
def test_hash_seed(version, seed, state):
    finding = machine_checks.hash_seed(f"vllm {version}", version, seed)
    assert finding.state == state
    assert state == "ok" or "PYTHONHASHSEED=0" in finding.reason


def test_numa_nodes_are_those_of_the_cpus(tmp_path):
    for node, cpus in (("node0", "0-3,8"), ("node1", "4-7\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus)
    assert machine_checks.numa_nodes_of({8}, tmp_path) == [0]
    assert machine_checks.numa_nodes_of({3, 4}, tmp_path) == [0, 1]
    assert machine_checks.numa_nodes_of({99}, tmp_path) == []


def test_every_finding_has_a_state_and_a_text():
    for finding in machine_checks.findings():
        assert finding.state in ("ok", "warn", "FAIL")
        assert finding.found
        assert finding.state == "ok" or finding.reason
