"""A node's own part in the directory: its record under a lease, its spans, and the spans of those who died.

Invariants:
- The lease is on the node's record alone. A node whose lease ran out, as while etcd was away, takes a new one under the same epoch; its
  spans are there again at once, without being written anew.
- What is in the book and what is in the control plane become equal: changes are written in batches, and now and then, and after every new
  lease, all of it is compared.
- Nothing here is waited for by a request.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from tutti_mooncake.directory.broker import MOST_BATCH, Broker, BrokerError, Change, LeaseLost
from tutti_mooncake.directory.records import Keys, NodeRecord, RecordError
from tutti_mooncake.directory.repeater import Repeater
from tutti_mooncake.directory.span_book import SpanBook
from tutti_mooncake.directory.view import DirectoryView, Incarnation

logger = logging.getLogger(__name__)

MOST_BATCHES = 32
"""Of one step, so that it ends; the lease is looked after between batches."""
EPOCH_SPREAD = 1 << 16
"""Two processes that begin behind the same record at once don't get the same epoch, most likely."""


class Member:
    """`record`: its epoch is raised at the first registration where one not earlier is there. `view`: where the dead are seen, kept by a
    Follower; `usable`: whether it is fresh. `ttl_seconds`: how long the node is taken for alive after it was last heard of.
    `publish_seconds`: between batches; changes of one span within that time are written once. `reap_seconds`: between a node's end and the
    deletion of its spans. `step` and the thread of `start` exclude each other.
    """

    def __init__(
        self,
        broker: Broker,
        keys: Keys,
        record: NodeRecord,
        book: SpanBook,
        view: DirectoryView,
        *,
        ttl_seconds: float = 10.0,
        publish_seconds: float = 1.0,
        reconcile_seconds: float = 300.0,
        reap_seconds: float = 60.0,
        usable: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record = record
        self._broker = broker
        self._keys = keys
        self._book = book
        self._view = view
        self._ttl_seconds = ttl_seconds
        self._publish_seconds = publish_seconds
        self._reconcile_seconds = reconcile_seconds
        self._reap_seconds = reap_seconds
        self._usable = usable
        self._clock = clock
        self._lease = 0
        self._kept = 0.0
        self._published = float("-inf")
        self._reconcile_at = 0.0
        self._dead_since: dict[Incarnation, float] = {}
        self._repeater = Repeater("tutti-member", self._repeat)
        self.superseded = False
        """Another process has taken this node's name, with a later epoch: this one is out of the directory for good."""
        self.registrations = 0
        """Leases taken so far."""
        self.writes = 0
        """Batches written so far."""
        self.last_error = ""
        """Of the control plane; empty while it answers."""

    @property
    def registered(self) -> bool:
        """Whether the node has a lease, as far as it knows."""
        return self._lease != 0

    def start(self) -> None:
        """Registers and publishes in a thread of its own, until `stop` or `leave`."""
        self._repeater.start()

    def stop(self) -> None:
        """Returns when the thread has ended. The node is taken for alive until its lease runs out, as after a crash."""
        self._repeater.stop()

    def leave(self) -> None:
        """Stops, and takes the node and its spans out of the directory. Raises BrokerError; a reaper does the rest then."""
        self.stop()
        lease, self._lease = self._lease, 0
        if lease:
            self._broker.revoke(lease)
        self._broker.delete_prefix(self._keys.spans_of(self.record.node, self.record.epoch))

    def step(self) -> None:
        """Does what is due. Raises BrokerError; what wasn't done is due again then."""
        if self.superseded:
            return
        try:
            if self._someone_later():
                self._step_down()
            else:
                self._hold_lease()
            now = self._clock()
            if now >= self._reconcile_at and not self.superseded:
                self._book.join()
                self._reconcile()
                self._reconcile_at = now + self._reconcile_seconds
            if self.superseded:
                return
            if now - self._published >= self._publish_seconds:
                self._publish()
                self._published = now
            self._reap(now)
        except BrokerError as error:
            self.last_error = str(error)
            raise
        self.last_error = ""

    def _someone_later(self) -> bool:
        seen = self._view.node(self.record.node)
        return self.registrations > 0 and seen is not None and seen.epoch > self.record.epoch

    def _step_down(self) -> None:
        self.superseded = True
        self._book.abandon()
        self._lease = 0  # its key is the other's now; it runs out by itself
        logger.error(
            "another process has joined as node %s; this one leaves the directory (give each node a name of its own)", self.record.node
        )

    def _hold_lease(self) -> None:
        now = self._clock()
        if self._lease and now - self._kept >= self._ttl_seconds / 3:
            try:
                self._broker.keep_alive(self._lease)
                self._kept = now
            except LeaseLost:
                logger.warning("directory: the lease of node %s had run out; registering again", self.record.node)
                self._lease = 0
        if self._lease:
            return
        there = self._epoch_there()
        if self.registrations and there > self.record.epoch:
            self._step_down()
            return
        if not self.registrations and there >= self.record.epoch:  # a start is later than those before, also where the clock went back
            self.record = replace(self.record, epoch=there + 1 + secrets.randbelow(EPOCH_SPREAD))
        lease = self._broker.grant(self._ttl_seconds)
        self._put_record(lease)
        self._lease, self._kept = lease, now
        self._reconcile_at = now
        self.registrations += 1

    def _epoch_there(self) -> int:
        """Of the record under this node's name; 0 where there is none that can be read."""
        key = self._keys.node(self.record.node)
        value = self._broker.snapshot(key).items.get(key)
        try:
            return 0 if value is None else NodeRecord.decode(self.record.node, value).epoch
        except RecordError:
            return 0

    def _put_record(self, lease: int) -> None:
        self._broker.apply([Change(self._keys.node(self.record.node), self.record.encode())], lease)

    def _publish(self) -> None:
        for _ in range(MOST_BATCHES):
            if not (taken := self._book.take(MOST_BATCH)):
                return
            own = self.record
            changes = [
                Change(self._keys.span(own.node, own.epoch, number), None if span is None else span.encode()) for number, span in taken
            ]
            try:
                self._broker.apply(changes)
            except BrokerError:
                self._book.put_back([number for number, _ in taken])
                raise
            self.writes += 1
            self._hold_lease()
            if self.superseded:
                return

    def _reconcile(self) -> None:
        """Compares all of this node's records with what they should be; spans of its earlier epochs go."""
        own = self.record
        there_epoch = self._epoch_there()
        if there_epoch > own.epoch:
            self._step_down()
            return
        if there_epoch != own.epoch:
            self._put_record(self._lease)
        there = dict(self._broker.snapshot(self._keys.spans_of(own.node)).items)
        wanted = {self._keys.span(own.node, own.epoch, number): span.encode() for number, span in self._book.all()}
        changes = [Change(key, None) for key in there if key not in wanted and not self._is_later(key)]
        changes += [Change(key, value) for key, value in wanted.items() if there.get(key) != value]
        for begin in range(0, len(changes), MOST_BATCH):
            self._broker.apply(changes[begin : begin + MOST_BATCH])
            self.writes += 1
            self._hold_lease()
            if self.superseded or self._repeater.stopping:
                return

    def _is_later(self, key: str) -> bool:
        """Whether a span is of a later start of this node: another process is taking over."""
        try:
            return self._keys.parse_span(key)[1] > self.record.epoch
        except RecordError:
            return False

    def _reap(self, now: float) -> None:
        """The first of the living deletes what the dead have left."""
        dead = self._view.dead()
        self._dead_since = {one: self._dead_since.get(one, now) for one in dead}
        living = self._view.nodes()
        if not self._usable() or not living or living[0].node != self.record.node:
            return
        for (node, epoch), since in self._dead_since.items():
            if now - since >= self._reap_seconds and not self._may_live(node, epoch):
                self._broker.delete_prefix(self._keys.spans_of(node, epoch))

    def _may_live(self, node: str, epoch: int) -> bool:
        """Asks the control plane itself: the view may be behind, and a record of a later version can't be read here."""
        key = self._keys.node(node)
        value = self._broker.snapshot(key).items.get(key)
        try:
            return value is not None and NodeRecord.decode(node, value).epoch == epoch
        except RecordError:
            return True

    def _repeat(self) -> float | None:
        self.step()
        return None if self.superseded else min(self._publish_seconds, self._ttl_seconds / 10)
