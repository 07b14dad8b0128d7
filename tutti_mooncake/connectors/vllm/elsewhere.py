"""What other nodes hold of a prompt, for the scheduler half. From memory: nothing here waits for anybody.

An engine whose weights change leaves the cluster: what others hold, and what they would fetch from it, may be of other weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from tutti_mooncake.agent.node import Node
from tutti_mooncake.config import ClusterConfig
from tutti_mooncake.connectors.vllm.metadata import FetchWork
from tutti_mooncake.connectors.vllm.registry import EngineStore
from tutti_mooncake.remote.fetcher import Fetched
from tutti_mooncake.schedule import BreakerState

if TYPE_CHECKING:
    from tutti_mooncake.agent.sources import FetchPlan

logger = init_logger(f"vllm.{__name__}")


class Elsewhere:
    """Joins the cluster; `close` it before the store. Raises what `Node` raises."""

    def __init__(self, engine_store: EngineStore, config: ClusterConfig) -> None:
        self._engine_store = engine_store
        self._store = store = engine_store.store
        self._seconds = config.fetch_deadline_seconds
        self.node: Node | None = Node(store, config, stats=self._stats)
        record = self.node.member.record
        logger.info("TuttiConnector: node %s at %s, by etcd at %s", record.node, record.address, config.etcd)

    def plan(self, keys: Sequence[bytes]) -> FetchPlan | None:
        """Whom to ask for the blocks of `keys`, consecutive ones of one chain; `None` when nobody has the first one."""
        return self.node.sources.plan(self._store.salted(keys)) if self.node is not None and keys else None

    def begin(self, plan: FetchPlan, block_ids: list[int]) -> FetchWork:
        """The worker's part of a plan, of which as many blocks are wanted; `ended` is to be called once."""
        if self.node is not None:
            self.node.sources.begin(plan)
        return FetchWork(plan.owners, plan.keys[: len(block_ids)], block_ids, self._seconds)

    def ended(self, plan: FetchPlan, fetched: Fetched) -> None:
        """How it ended."""
        if self.node is not None:
            self.node.sources.ended(plan, fetched.tries)

    def gauges(self) -> dict[str, dict[str, float]]:
        """For vLLM's metrics; none when it has left."""
        if self.node is None:
            return {}
        stats = self.node.view.stats()
        return {
            "tutti_cluster_nodes": {"": stats.nodes},
            "tutti_cluster_blocks": {"": stats.blocks},
            "tutti_directory_stale_seconds": {"": self.node.follower.stale_seconds},
            "tutti_peers_left_alone": {"": sum(state == BreakerState.OPEN for state in self.node.sources.breakers().values())},
            "tutti_transport_info": {self.node.transport.protocol: 1},
        }

    def served(self) -> dict[str, dict[str, float]]:
        """Counters of what others were sent, for vLLM's metrics."""
        counters = {} if self.node is None else self.node.owner.counters
        return {f"tutti_served_{what}_total": {"": counters.get(what, 0)} for what in ("blocks", "bytes")}

    def report(self) -> dict[str, Any]:
        """For people and tests: this node, who else is there, and how many blocks they hold."""
        if self.node is None:
            return {"node": "", "nodes": [], "blocks": 0}
        record, view = self.node.member.record, self.node.view
        return {
            "node": record.node,
            "epoch": record.epoch,
            "address": record.address,
            "transport": self.node.transport.protocol,
            "nodes": [one.node for one in view.nodes()],
            "blocks": view.stats().blocks,
            "usable": self.node.follower.usable,
            "sources": asdict(self.node.sources.counters),
            "breakers": self.node.sources.breakers(),
            "served": dict(self.node.owner.counters),
        }

    def _stats(self) -> dict[str, Any]:
        """What `tutti top` shows; asked for in threads of the owner."""
        store = self._store.stats()
        names = ("resident_blocks", "slots", "block_bytes", "pins", "evicted_blocks")
        return {"engine": self._engine_store.counters.as_dict(), "store": {name: int(store.get(name, 0)) for name in names}}

    def leave(self) -> None:
        """For good: this engine's weights have changed."""
        if self.node is not None:
            self.close()
            logger.warning(
                "the model's weights have changed: this engine neither fetches from other nodes nor serves them until it restarts"
            )

    def close(self) -> None:
        """Leaves the cluster. Any number of times."""
        if self.node is not None:
            self.node.close()
            self.node = None
