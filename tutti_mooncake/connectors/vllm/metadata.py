"""What the scheduler half tells the worker half, once per engine step.

Invariants:
- Every load in a step's metadata is answered by exactly one entry of `finished_recving`, cancelled or not.
- Every request in `finishing` is answered by exactly one entry of `finished_sending`; a request is never in both
  answers.
- Work is taken out of the metadata, so that hooks which vLLM calls once or twice per step submit it only once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True)
class BlockTransfer:
    """Consecutive blocks of one prefix chain, and the engine blocks that hold them.

    `keys[i]` (32 bytes each) belongs to engine block `block_ids[i]`. `parent` is the key of the block before
    `keys[0]`, or `None` at the start of a chain.
    """

    request_id: str
    keys: list[bytes]
    block_ids: list[int]
    parent: bytes | None


@dataclass
class TuttiConnectorMetadata(KVConnectorMetadata):
    """One step's work.

    `preempted`: requests whose blocks are free for others from this step on; their running stores must end first.
    `finishing`: ended requests whose blocks vLLM keeps until their stores are done.
    `cancelled_loads`: requests that ended while their load was running.
    `idle`: no token is computed in this step, so that waiting a moment for I/O delays nobody.
    """

    loads: list[BlockTransfer] = field(default_factory=list)
    stores: list[BlockTransfer] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finishing: list[str] = field(default_factory=list)
    cancelled_loads: list[str] = field(default_factory=list)
    idle: bool = False

    def take_loads(self) -> list[BlockTransfer]:
        """The loads not yet taken."""
        loads, self.loads = self.loads, []
        return loads

    def take_stores(self) -> list[BlockTransfer]:
        """The stores not yet taken."""
        stores, self.stores = self.stores, []
        return stores
