"""The breaker over a clock that the test steps."""

from __future__ import annotations

import pytest

from tests.clock import Clock
from tutti_mooncake.schedule import Breaker, BreakerState


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(3, 1.0, clock, longest_wait_seconds=4.0)


def fail(breaker: Breaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.attempt()
        breaker.failure()


def test_opens_after_failures_in_a_row_only(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.success()
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED and breaker.allows()
    fail(breaker)
    assert breaker.state is BreakerState.OPEN and not breaker.allows()
    assert breaker.opened == 1


def test_one_attempt_decides_whether_it_closes(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 1.0
    assert breaker.allows() and breaker.state is BreakerState.OPEN
    breaker.attempt()
    assert breaker.state is BreakerState.HALF_OPEN and not breaker.allows()
    breaker.success()
    assert breaker.state is BreakerState.CLOSED and breaker.allows()


def test_waits_twice_as_long_after_each_vain_attempt_up_to_a_limit(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    for wait in (1.0, 2.0, 4.0, 4.0):
        clock.now += wait * 0.99
        assert not breaker.allows()
        clock.now += wait * 0.01
        assert breaker.allows()
        fail(breaker)
    clock.now += 4.0
    breaker.attempt()
    breaker.success()
    fail(breaker, 3)
    clock.now += 1.0
    assert breaker.allows(), "the wait begins small again"


def test_an_attempt_whose_end_nobody_tells_does_not_keep_it_open_for_ever(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 1.0
    breaker.attempt()
    clock.now += 1.0
    assert breaker.allows()


def test_late_failures_of_what_ran_when_it_opened_change_nothing(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    breaker.failure()
    assert breaker.opened == 1
    clock.now += 1.0
    assert breaker.allows()


def test_an_attempt_that_tells_nothing_keeps_none_away_that_can(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 1.0
    for _ in range(3):
        breaker.attempt()
        breaker.undecided()
        assert breaker.allows() and breaker.state is BreakerState.OPEN
    fail(breaker)
    clock.now += 1.0
    assert not breaker.allows(), "the wait is twice as long"
