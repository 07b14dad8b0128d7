"""The store: blocks of KV on local devices, found by key, kept across restarts."""

from tutti_mooncake.store.local_store import LocalStore
from tutti_mooncake.store.operations import Result, RetrieveOperation, StoreOperation
from tutti_mooncake.store.pool import read_geometry
from tutti_mooncake.store.reports import BlockInfo, Pin, RecoveryReport, VerifyReport

__all__ = [
    "BlockInfo",
    "LocalStore",
    "Pin",
    "RecoveryReport",
    "Result",
    "RetrieveOperation",
    "StoreOperation",
    "VerifyReport",
    "read_geometry",
]
