"""The best validation and the patience: by values alone, so that a resumed run gets the same answers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from cellmill.config.run import Train
from cellmill.errors import ConfigError
from cellmill.train.validation import Progress, check_best_metric
from tests.models import model_on_cpu

CASES: list[tuple[dict[str, Any], list[float], list[int], int | None]] = [
    # options, values, steps of best validations, step at which patience is over
    ({"early_stop_patience": 2}, [5, 4, 4, 3, 3.5, 3, 1], [1, 2, 4, 7], 6),
    ({"early_stop_patience": 2, "best_mode": "max"}, [1, 2, 1.5, 3, 3, 2, 9], [1, 2, 4, 7], 6),
    # slow progress is the best each time, and no improvement until it adds up to more than 0.5
    (
        {"early_stop_patience": 3, "early_stop_min_delta": 0.5},
        [3, 2.75, 2.5, 2.25, 2, 1.9, 1.8],
        [1, 2, 3, 4, 5, 6, 7],
        7,
    ),
    ({"best_mode": "max"}, [5, 4, 3, 2, 1], [1], None),
]


@pytest.mark.parametrize(("options", "values", "best", "over"), CASES)
def test_the_best_step_and_the_end_follow_from_the_values_also_when_resumed_at_each(
    options: dict[str, Any], values: list[float], best: list[int], over: int | None
) -> None:
    train, progress, found, ended = Train.model_validate({"steps": 99} | options), Progress(), [], None
    for step, value in enumerate(values, start=1):
        progress = Progress(**(asdict(progress) | {"step": step, "val_loss": -value}))
        if progress.judge(value, train):
            found.append(step)
            assert (progress.best_step, progress.best_value, progress.best_val_loss) == (step, value, -value)
        if ended is None and progress.patience_is_over(train):
            ended = step
    assert (found, ended) == (best, over)


def test_a_metric_that_no_validation_logs_is_refused() -> None:
    objective = model_on_cpu(
        9, None, objective="classification", label_column="a", levels={"a": ("x", "y")}, hidden=8, heads=1, layers=1
    ).objective
    for known in ("val_loss", "val_accuracy", "effective_rank"):
        check_best_metric(objective, known)
    with pytest.raises(ConfigError) as error:
        check_best_metric(objective, "val_acuracy")
    assert str(error.value) == (
        "train.best_metric val_acuracy: validation of this objective does not log it; did you mean 'val_accuracy'?"
    )
