"""Who owns a pool: read beside the owner, without its lock."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from tutti_mooncake.config import StoreConfig
from tutti_mooncake.store import format as on_disk
from tutti_mooncake.store.pool import open_first_device


def read_owner(config: StoreConfig) -> dict[str, Any]:
    """Who owns a pool, or owned it last, and the counters that it left.

    `pid`, `host`, `since` (seconds since 1970), `running` (None where that can't be told: the owner is on another host), `clean` (whether
    it closed the pool), `counters` of that process and `counters_age_seconds`. Raises PoolMissing, DeviceUnavailable.
    """
    device = open_first_device(config)
    try:
        state, counters = on_disk.read_state(device.buffered_fd), on_disk.read_counters(device.buffered_fd)
    finally:
        device.close()
    clean = bool(state.get("clean", True))
    here = state.get("host") == socket.gethostname()
    running = False if clean else (_process_runs(state.get("pid"), float(state.get("time", 0))) if here else None)
    owner = {"pid": state.get("pid"), "host": state.get("host"), "since": state.get("time"), "clean": clean, "running": running}
    if counters.get("pid") == state.get("pid"):
        age = max(0.0, time.time() - float(counters.pop("time", 0)))
        counters.pop("pid", None)
        owner.update(counters=counters, counters_age_seconds=round(age, 1))
    return owner


def _process_runs(pid: object, since: float) -> bool:
    """Whether a process of this host lives and existed at `since` (seconds since 1970): else its number is another's by now."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            state, *values = file.read().rpartition(")")[2].split()
        with open("/proc/stat", encoding="utf-8") as file:
            boot = next(float(line.split()[1]) for line in file if line.startswith("btime"))
    except (OSError, StopIteration):
        return False
    started = boot + int(values[18]) / os.sysconf("SC_CLK_TCK")
    return state != "Z" and started <= since + 2.0  # btime is in whole seconds
