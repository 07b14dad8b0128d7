"""`scripts/soak NAME [--rounds N] [--seed S]`: long campaigns, bounded, with their seeds printed."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.kill_loop import run_once
from tests.soak.mixing import mix
from tutti_mooncake import _native


def executors() -> list[str]:
    """Those that work here."""
    return ["posix"] if _native.probe_uring() else ["uring", "posix"]


def kill(rounds: int, seed: int, root: Path) -> list[str]:
    """kill -9 at random points of a store/evict/reuse loop, on each executor in turn."""
    wrong: list[str] = []
    for index in range(rounds):
        executor = executors()[index % len(executors())]
        wrong += run_once(root / executor, seed + index, executor, "flush" if index % 10 == 9 else "data")
        if index % 100 == 99:
            print(f"{index + 1} of {rounds} kills, {len(wrong)} problems", flush=True)
    return wrong


def sessions(rounds: int, seed: int, root: Path) -> list[str]:
    """Readers and writers over a pool that turns over: `rounds` gets, every byte compared."""
    return mix(root, executors()[0], rounds, seed)


def scenarios(rounds: int, seed: int, root: Path) -> list[str]:
    """Random scenarios on real vLLM engines, a quarter of the rounds on each variant; needs vLLM."""
    from tests.e2e.vllm.scenarios import VARIANTS, run_seed, start

    wrong: list[str] = []
    for index, variant in enumerate(VARIANTS):
        (root / str(index)).mkdir()
        engine = start(variant, root / str(index))
        loads = failed = preempted = 0
        try:
            for number in range(seed, seed + rounds // len(VARIANTS)):
                try:
                    grown = run_seed(engine, number, {})
                except Exception as error:
                    wrong.append(f"{variant.name}: {error}")
                    engine.kill()
                    (root / f"{index}-{number}").mkdir()
                    engine = start(variant, root / f"{index}-{number}")
                    continue
                loads, failed = loads + grown["loads"], failed + grown["loads_failed"]
                preempted += grown["preemptions"]
        finally:
            engine.kill()
        print(f"{variant.name}: {loads} loads, {failed} failed, {preempted} preemptions, {len(wrong)} problems so far", flush=True)
    return wrong


def cluster(rounds: int, seed: int, root: Path) -> list[str]:
    """Two real vLLM engines and etcd; one fetches what the other has computed, and at a random moment one of them is killed, stopped,
    wiped or lies; needs vLLM."""
    from tests.e2e.vllm.cluster_pair import PROMPTS, Pair, disturbed_round
    from tests.e2e.vllm.tiny_model import make_tiny_model

    wrong: list[str] = []
    whole = part = 0
    pair = Pair.start(root, make_tiny_model(root / "model"))
    try:
        cold = [pair.a.computes(prompt) for prompt in PROMPTS]
        for number in range(seed, seed + rounds):
            try:
                grown = disturbed_round(pair, cold, number)
                whole, part = whole + grown["fetches_ok"], part + grown["fetches_failed"]
            except Exception as error:
                wrong.append(f"seed {number}: {error}")
                pair.kill()
                (root / str(number)).mkdir()
                pair = Pair.start(root / str(number), root / "model")
                cold = [pair.a.computes(prompt) for prompt in PROMPTS]
            if number % 20 == 0:
                print(f"seed {number}: {whole} whole fetches, {part} that failed in part, {len(wrong)} problems", flush=True)
    finally:
        pair.kill()
    print(f"{rounds} rounds: {whole} whole fetches, {part} that failed in part", flush=True)
    return wrong


NAMES: dict[str, tuple[Callable[[int, int, Path], list[str]], int]] = {
    "kill": (kill, 1000),
    "sessions": (sessions, 100_000),
    "scenarios": (scenarios, 2000),
    "cluster": (cluster, 200),
}


def main() -> int:
    """Runs one campaign; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("name", choices=sorted(NAMES))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    run, rounds = NAMES[arguments.name]
    rounds = arguments.rounds or rounds
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        wrong = run(rounds, arguments.seed, Path(folder))
    print("\n".join(wrong))
    print(f"{arguments.name}: {rounds} rounds, seed {arguments.seed}, {len(wrong)} problems, {time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
