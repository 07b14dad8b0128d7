"""The life of a store: open, closing, closed; closed before the interpreter ends, and given up by forked children.

A thread that waits in native code while the interpreter is torn down would abort the process. A forked child has none of the store's
threads, so it can't use it; but its copies of the descriptors would keep the pool's lock after the parent's death.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

from tutti_mooncake.errors import StoreClosed, TuttiError

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """What is tracked."""

    def close(self) -> None:
        """Ends it properly."""

    def abandon(self) -> None:
        """Lets its descriptors go, without locks or waiting."""


class Lifetime:
    """Whether a store is open, who is inside a long method of it, and which thread closes it. Thread-safe.

    `lock` is the store's: nothing that was begun under it while the store was open is overtaken by close().
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._idle = threading.Condition(lock)
        self._users: list[int] = []  # threads inside using()
        self._closer: int | None = None
        self._gone = threading.Event()  # everything has been given back
        self.closed = False
        self.abandoned = False

    def check_open(self) -> None:
        """Raises StoreClosed once closing() has begun."""
        if self.closed:
            raise StoreClosed("the store is closed")

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Keeps the devices open meanwhile. Raises StoreClosed once closing() has begun."""
        with self._lock:
            self.check_open()
            self._users.append(threading.get_ident())
        try:
            yield
        finally:
            with self._lock:
                self._users.remove(threading.get_ident())
                self._idle.notify_all()

    @contextlib.contextmanager
    def closing(self) -> Iterator[bool]:
        """True for the one who has to give everything back, after the last user has left. Others get False when that has been done.

        Also False, at once, for a signal handler inside the closing thread. Interrupted while it waits for users, it leaves the work to the
        next caller.
        """
        me = threading.get_ident()
        with self._lock:
            if me in self._users:
                raise TuttiError("close() was called from inside verify() or entries() of the same store")
            self.closed = True
            mine = self._closer is None
            self._closer = me if mine else self._closer
        if not mine:
            if self._closer != me:
                self._gone.wait()
            yield False
            return
        try:
            with self._lock:
                self._idle.wait_for(lambda: not self._users)
        except BaseException:
            self._closer = None
            raise
        try:
            yield True
        finally:
            self._gone.set()

    def abandon(self, lock: threading.RLock) -> None:
        """In a forked child, where the old lock may be held by a thread that isn't there: closed, under a new lock."""
        self._lock = lock
        self._idle = threading.Condition(lock)
        self._users = []
        self._closer = -1
        self._gone.set()
        self.closed = self.abandoned = True


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
