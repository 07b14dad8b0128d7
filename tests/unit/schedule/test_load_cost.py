"""The costs that decide between loading and computing."""

from __future__ import annotations

import random

import pytest

from tutti_mooncake.schedule import LinearCost, LoadCost


def fitted(fixed: float, each: float, amounts: range, noise: float = 0.0) -> LinearCost:
    source = random.Random(3)
    cost = LinearCost()
    for amount in amounts:
        cost.observe(amount, (fixed + each * amount) * (1 + noise * source.uniform(-1, 1)))
    return cost


def test_finds_the_line_that_was_measured() -> None:
    cost = fitted(0.004, 0.0005, range(1, 60))
    assert cost.fixed == pytest.approx(0.004, rel=1e-6) and cost.each == pytest.approx(0.0005, rel=1e-6)
    noisy = fitted(0.004, 0.0005, range(1, 200), noise=0.2)
    assert noisy.seconds(100) == pytest.approx(0.054, rel=0.1)


def test_equal_amounts_are_a_rate_without_a_fixed_part() -> None:
    cost = LinearCost()
    for _ in range(5):
        cost.observe(128, 0.064)
    assert cost.each == pytest.approx(0.0005) and cost.fixed == pytest.approx(0.0, abs=1e-9)


def test_never_negative() -> None:
    falling = LinearCost()
    for amount in range(1, 20):
        falling.observe(amount, 1.0 / amount)
    assert falling.each >= 0 and falling.fixed >= 0
    steep = LinearCost()
    for amount in range(10, 20):
        steep.observe(amount, max(0.0, amount - 9.0))
    assert steep.fixed >= 0 and steep.seconds(5) >= 0


def test_follows_a_machine_that_changes() -> None:
    cost = fitted(0.0, 0.001, range(1, 100))
    for amount in range(1, 400):
        cost.observe(amount % 100 + 1, 0.01 * (amount % 100 + 1))
    assert cost.each == pytest.approx(0.01, rel=0.05)


def test_loads_everything_until_enough_is_known() -> None:
    cost = LoadCost(load=fitted(1.0, 0.1, range(1, 10)))
    assert cost.worth(1, 16) and not cost.hidden(1, 16)


def test_short_hits_are_computed_and_long_ones_loaded() -> None:
    cost = LoadCost(load=fitted(0.002, 0.00001, range(1, 200)), step=fitted(0.01, 0.00002, range(1, 512)))
    assert not cost.worth(1, 16), "2 ms to load what 0.3 ms compute"
    assert cost.worth(100, 1600), "3 ms against 32 ms"
    assert cost.hidden(100, 512) and not cost.hidden(2000, 512)


def test_one_refusal_in_sixteen_is_tried_all_the_same() -> None:
    cost = LoadCost(load=fitted(1.0, 0.1, range(1, 10)), step=fitted(0.01, 0.00002, range(1, 512)))
    assert [cost.worth(1, 16) for _ in range(32)].count(True) == 2


def test_is_kept_as_plain_numbers_and_survives_nonsense() -> None:
    cost = LoadCost(load=fitted(0.002, 0.00001, range(1, 200)), step=fitted(0.01, 0.00002, range(1, 512)))
    again = LoadCost.from_dict(cost.as_dict())
    assert again.as_dict() == cost.as_dict() and again.load.seconds(7) == cost.load.seconds(7)
    for nonsense in ({}, {"load": 3}, {"load": {"weight": "x"}, "step": {"weight": float("nan")}}, {"load": {"weight": -1.0}}):
        assert LoadCost.from_dict(nonsense).worth(1, 16)
        assert not LoadCost.from_dict(nonsense).load.known
