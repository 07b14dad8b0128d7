"""Sessions that come back from disk must get their own bytes or a miss, however the pool turns over meanwhile."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np

from tests.pattern import PatternTensors, chain, device_of, geometry
from tutti_mooncake import LocalStore, Status, StoreConfig

SESSIONS, BLOCKS, WORKERS = 64, 32, 16


def mix(root: Path, executor: str, gets: int, seed: int) -> list[str]:
    """Runs until `gets` blocks came back; returns what was wrong. The pool holds about a tenth of the sessions' blocks."""
    config = StoreConfig(devices=(str(root / "a"), str(root / "b")), capacity="8MiB", executor=executor)
    store = LocalStore.open(config, geometry())
    tensors = PatternTensors(store.geometry, WORKERS * BLOCKS, device=device_of(executor))
    store.register(tensors.tensors)
    prompts = [chain(("session", index), BLOCKS) for index in range(SESSIONS)]
    wrong: list[str] = []
    loaded = itertools.count(1)
    done = threading.Event()

    def session(worker: int) -> None:
        random = np.random.default_rng((seed, worker))
        mine = worker * BLOCKS
        while not done.is_set():
            keys = prompts[int(random.integers(0, SESSIONS))]
            if random.random() < 0.5:
                chunk = keys[: int(random.integers(1, BLOCKS + 1))]
                tensors.write(chunk, mine)
                store.store(chunk, range(mine, mine + len(chunk))).wait(30)
                continue
            hit = store.lookup(keys)
            tensors.wipe(mine, BLOCKS)
            result = store.retrieve(keys[:hit], range(mine, mine + hit)).wait(30)
            for position in np.flatnonzero(result.statuses == Status.OK).tolist():
                if not tensors.holds(keys[position], mine + position):
                    wrong.append(f"seed {seed}, worker {worker}: foreign bytes at {position}")
                if next(loaded) >= gets:
                    done.set()

    threads = [threading.Thread(target=session, args=(worker,)) for worker in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = store.stats()
    if stats["pinned_blocks"] or stats["checksum_errors"] or stats["resident_blocks"] + stats["free_blocks"] != stats["slots"]:
        wrong.append(f"seed {seed}: accounting is off: {stats}")
    if not stats.get("evicted_blocks"):
        wrong.append(f"seed {seed}: nothing was evicted, so nothing was tested")
    store.close()
    return wrong
