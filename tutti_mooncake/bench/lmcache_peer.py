"""LMCache's local disk backend as a peer, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys


class LmcachePeer:
    """Drives tutti_mooncake/bench/lmcache_process.py. `block_bytes` = all layers of one block, one LMCache chunk."""

    def __init__(self, site: str, directory: str, blocks: int, block_bytes: int) -> None:
        environment = {**os.environ, "PYTHONPATH": site, "LMCACHE_LOG_LEVEL": "ERROR", "OMP_WAIT_POLICY": "passive"}
        program = os.path.join(os.path.dirname(__file__), "lmcache_process.py")
        self._process = subprocess.Popen(
            [sys.executable, program, directory, str(blocks), str(block_bytes)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.note = str(self._answer()["note"])

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # other lines are LMCache's own talk
            if line.startswith("ANSWER "):
                return dict(json.loads(line[7:]))
        raise SystemExit(f"bench local: the LMCache process ended with {self._process.wait()}")

    def _ask(self, what: str) -> tuple[float, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return float(str(answer["wall"])), float(str(answer["cpu"]))

    def store(self) -> tuple[float, float]:
        """Writes all blocks anew: (wall, processor) seconds."""
        return self._ask("store")

    def retrieve(self) -> tuple[float, float]:
        """Reads all blocks after their pages were dropped, and compares: (wall, processor) seconds of the reads."""
        return self._ask("retrieve")

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
