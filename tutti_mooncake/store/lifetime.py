"""Open stores of this process: closed before the interpreter ends, and given up by forked children.

A thread that waits in native code while the interpreter is torn down would abort the process. A forked child has none of the store's
threads, so it can't use it; but its copies of the descriptors would keep the pool's lock after the parent's death.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import Protocol

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """What is tracked."""

    def close(self) -> None:
        """Ends it properly."""

    def abandon(self) -> None:
        """Lets its descriptors go, without locks or waiting."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def track(store: Closable) -> None:
    """From now on `store` is closed at exit and abandoned in forked children. It may be closed before."""
    _open.add(store)


def _close_all() -> None:
    for store in list(_open):
        try:
            store.close()
        except Exception:
            logger.exception("closing a store at exit failed")


def _abandon_all() -> None:
    for store in list(_open):
        store.abandon()
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
