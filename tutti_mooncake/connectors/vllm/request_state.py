"""What the scheduler half knows of a request, of the offer made for it, and of its running transfers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tutti_mooncake import RetrieveOperation, StoreOperation
from tutti_mooncake.connectors.vllm.accounting import Finding
from tutti_mooncake.remote.fetcher import Fetched

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from tutti_mooncake import Pin
    from tutti_mooncake.agent.sources import FetchPlan


BlockTables = tuple[list[int], ...]
NULL_BLOCK = 0
"""vLLM's block that stands for none."""


def asked(request: Request, name: str, *, default: bool) -> bool:
    """What a request says in its `kv_transfer_params`: `tutti_load`, `tutti_store`, `tutti_admit`."""
    parameters = request.kv_transfer_params
    return bool(parameters.get(name, default)) if parameters else default


@dataclass
class Offer:
    """Blocks of a request's chain: `[begin, local_end)` were found in the store, and `pin` keeps them there; `[local_end, end)` are to be
    fetched by `plan`.
    """

    pin: Pin | None
    begin: int
    local_end: int
    end: int
    layerwise: bool = False
    plan: FetchPlan | None = None


@dataclass
class Load:
    """A load on its way: the engine blocks it fills (of the first KV cache group; `local` of them from the store, the others by `plan`) and
    the position of the first one in its chain. `fetched`: how the fetch ended.
    """

    operation: RetrieveOperation | None
    begin: int
    block_ids: list[int]
    local: int
    counts_as_hit: bool
    layerwise: bool
    request: Request
    finding: Finding
    plan: FetchPlan | None = None
    fetched: Fetched | None = None
    cancelled: bool = False


@dataclass
class Store:
    """A store on its way: blocks of a request from position `begin` on."""

    request: Request
    operation: StoreOperation
    begin: int


@dataclass
class RequestState:
    """What is known of one unfinished request."""

    request: Request
    block_ids: BlockTables = ()
    """Engine blocks by position, a list per KV cache group."""
    next_store: int = 0
    """Position of the first block that is neither stored nor planned."""
    finding: Finding = field(default_factory=Finding)
    """Of the last lookup."""
    offer: Offer | None = None
    admitted: bool = False
    load_failed: bool = False
    has_stores: bool = False
