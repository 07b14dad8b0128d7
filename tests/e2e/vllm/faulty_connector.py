"""The connector of `faulty_engine`: its I/O fails when the injector says so."""

from __future__ import annotations

import os
from typing import Any

from tutti_mooncake._native import FaultInjector
from tutti_mooncake.connectors.vllm import TuttiConnector
from tutti_mooncake.connectors.vllm.namespace import tensor_parallel_rank

FAULTS = FaultInjector()


class FaultyConnector(TuttiConnector):
    """Shares one fault injector with the server in the same process.

    FAULTY_RANK in the environment names a tensor-parallel rank in whose process the first reads of two objects come back damaged.
    """

    faults = FAULTS

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        if os.environ.get("FAULTY_RANK") == str(tensor_parallel_rank(ranks)):
            FAULTS.add(write=False, kind="corrupt", limit=2)
