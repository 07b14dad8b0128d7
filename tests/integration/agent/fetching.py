"""A plan made and carried out in one place, as scheduler and worker do it together."""

from __future__ import annotations

import numpy as np

from tutti_mooncake import Status
from tutti_mooncake.agent.sources import Sources
from tutti_mooncake.keys import as_key_array
from tutti_mooncake.remote.fetcher import Fetched, Fetcher


def fetch(sources: Sources, fetcher: Fetcher, keys: list[bytes], first: int = 0, seconds: float = 20.0) -> Fetched:
    """Into blocks from `first` on."""
    salted = as_key_array(keys)
    plan = sources.plan(salted)
    if plan is None:
        return Fetched(0, Status.NOT_FOUND, 0, 0.0, [])
    sources.begin(plan)
    fetched = fetcher.fetch_from(plan.owners, salted, np.arange(first, first + len(keys), dtype=np.uint32), seconds=seconds)
    sources.ended(plan, fetched.tries)
    return fetched
