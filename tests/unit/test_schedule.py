from __future__ import annotations

import math

import pytest

from cellmill.config.run import Train, learning_rate

TRAIN = Train(steps=100, lr=2.0, warmup_steps=10, min_lr_frac=0.1)


def test_warm_up_rises_linearly_to_the_peak() -> None:
    assert [learning_rate(TRAIN, step, 100) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_last_step_has_the_smallest_rate(schedule: str) -> None:
    train = TRAIN.model_copy(update={"schedule": schedule})
    rates = [learning_rate(train, step, 100) for step in range(10, 100)]
    assert rates[-1] == pytest.approx(0.2)
    assert rates == sorted(rates, reverse=True)


def test_cosine_is_the_closed_form() -> None:
    expected = 0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * 46 / 90))
    assert learning_rate(TRAIN, 55, 100) == pytest.approx(expected)


def test_wsd_is_constant_and_then_linear_over_the_last_steps() -> None:
    train = TRAIN.model_copy(update={"schedule": "wsd", "decay_frac": 0.2})
    rates = [learning_rate(train, step, 100) for step in range(10, 100)]
    assert set(rates[:70]) == {2.0}
    assert rates[70:] == pytest.approx([2 - 1.8 * (i + 1) / 20 for i in range(20)])


def test_wsd_decays_after_the_warm_up_where_both_do_not_fit() -> None:
    train = TRAIN.model_copy(update={"schedule": "wsd", "decay_frac": 1.0})
    assert learning_rate(train, 9, 100) == pytest.approx(2.0)
    assert learning_rate(train, 99, 100) == pytest.approx(0.2)
    assert learning_rate(train, 54, 100) == pytest.approx(1.1)


def test_constant_stays_at_the_peak() -> None:
    train = TRAIN.model_copy(update={"schedule": "constant"})
    assert {learning_rate(train, step, 100) for step in range(9, 100)} == {2.0}


def test_without_warm_up_the_first_step_is_near_the_peak() -> None:
    train = TRAIN.model_copy(update={"warmup_steps": 0})
    assert learning_rate(train, 0, 100) == pytest.approx(2.0, rel=1e-3)


def test_the_decay_of_wsd_is_rounded_up_to_whole_steps() -> None:
    train = TRAIN.model_copy(update={"schedule": "wsd", "warmup_steps": 0, "decay_frac": 0.25})
    rates = [learning_rate(train, step, 10) for step in (6, 7, 9)]  # 2.5 of 10 steps: the last three
    assert rates == pytest.approx([2.0, 2.0 * (0.1 + 0.9 * 2 / 3), 0.2])
