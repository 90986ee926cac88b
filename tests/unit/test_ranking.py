"""Which run is called best, and which runs are tied: over the tasks that all have, by the interval
of their difference.
"""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reported import make_dataset, make_method
from scipy.stats import ttest_rel

from cellmill.report import ranking
from cellmill.report.collect import ReportedRun
from cellmill.report.page import render
from cellmill.report.ranking import TaskScore, find_notable_difference, rank_runs, score_tasks
from cellmill.report.schemas import StatusSchema
from cellmill.report.standings import list_standings
from cellmill.runs.results import Difference, Evaluation, Row, Score, TaskResult

OWN = make_method("embedding", "kNN")
GENES = make_method("all genes", "LR")


def result(
    metric: str,
    values: list[float],
    baseline: float = 0.5,
    cells_se: float = 0.0,
    n: int | None = None,
) -> TaskResult:
    """Result of a task with one row of the model, of these repetitions, and one baseline."""
    rows = [
        Row(method, {metric: Score(float(np.mean(repetitions)), 0.0, repetitions)})
        for method, repetitions in ((OWN, values), (GENES, len(values) * [baseline]))
    ]
    line = Difference(metric, OWN.name, GENES.name, 0.0, 0.0, 0.0, cells_se, n)
    return TaskResult(rows, metric, differences=[line])


def run(name: str, **tasks: TaskResult) -> ReportedRun:
    """A run of 100 steps that was evaluated on dataset d."""
    evaluation = Evaluation({"d": make_dataset(**tasks)})
    return ReportedRun(name, None, StatusSchema(step=100), None, None, evaluation)


def first_line(runs: list[ReportedRun]) -> str:
    """The page's first sentences as text."""
    [found] = re.findall(r'<p class="summary">(.*?)</p>', render("r", runs, []), re.DOTALL)
    return " ".join(re.sub("<[^>]*>", "", found).split())


def test_runs_with_different_left_out_batches_are_not_tied() -> None:
    probe = result("accuracy", [0.90, 0.91, 0.90])
    runs = [
        run("first", probe=probe, leave_out=result("accuracy, new batch", [0.87, 0.88, 0.88])),
        run("second", probe=probe, leave_out=result("accuracy, new batch", [0.93, 0.94, 0.94])),
    ]
    assert [one.is_called_best for one in list_standings(runs)] == [False, True]
    assert first_line(runs).startswith(
        "second is best on d over the tasks that all have (probe, leave out): probe acc"
    )
    longer = [
        replace(one, status=StatusSchema(step=steps)) for one, steps in zip(runs, (200, 1600))
    ]
    assert not any(one.is_called_best for one in list_standings(longer))
    assert first_line(longer).startswith(
        "second has the highest mean on d over the tasks that all have (probe, leave out), but the runs were "
        "trained for different numbers of steps:"
    )


@pytest.mark.parametrize("status", [None, StatusSchema(), StatusSchema(step=200)])
def test_no_run_is_best_without_equal_known_steps(status: StatusSchema | None) -> None:
    scores = {"first": [0.80, 0.81, 0.80], "second": [0.90, 0.90, 0.91]}
    runs = [run(name, probe=result("f", values)) for name, values in scores.items()]
    assert [one.is_called_best for one in list_standings(runs)] == [False, True]
    changed = [replace(runs[0], status=status), runs[1]]
    assert not any(one.is_called_best for one in list_standings(changed))
    both = [replace(one, status=status) for one in runs]
    is_known = status is not None and status.step is not None
    assert any(one.is_called_best for one in list_standings(both)) == is_known
    if not is_known:
        for unknown in (changed, both):
            assert "second has the highest mean" in first_line(unknown)
            assert ", but not all numbers of training steps are known:" in first_line(unknown)


def test_a_run_that_is_different_but_not_worse_prevents_best() -> None:
    runs = [
        run("first", probe=result("f", [0.80, 0.80]), few_shot=result("g", [0.9, 0.1])),
        run("second", probe=result("f", [0.83, 0.831]), few_shot=result("g", [0.1, 0.6])),
    ]
    [first, second] = list_standings(runs)
    assert [win.run for win in first.ranking.wins_over_leader] == ["second"]
    assert (first.is_leader_or_tied, second.is_leader_or_tied) == (True, False)
    assert not first.is_called_best
    assert "first has the highest mean on d" in first_line(runs)


def test_a_difference_that_does_not_vary_has_no_interval() -> None:
    runs = [
        run("first", probe=result("f", [0.8, 0.8])),
        run("second", probe=result("f", [0.9, 0.9])),
    ]
    assert not any(one.is_called_best for one in list_standings(runs))
    assert ", not shown to be beyond chance:" in first_line(runs)


def test_runs_inside_the_interval_are_tied_in_every_task() -> None:
    runs = [
        run("first", probe=result("f", [0.80, 0.82, 0.81]), few_shot=result("5", [0.7, 0.8])),
        run("second", probe=result("f", [0.81, 0.80, 0.81]), few_shot=result("5", [0.72, 0.79])),
    ]
    assert [(one.is_leader_or_tied, one.is_called_best) for one in list_standings(runs)] == [
        (True, False)
    ] * 2
    shared = "over the tasks that all have (probe, few shot)"
    assert first_line(runs).startswith(
        f"first and second cannot be told apart on d {shared}; second has the highest mean: probe f 0.807;"
    )


def test_tied_runs_are_described_by_the_highest_mean() -> None:
    runs = [
        run("first", probe=result("f", [0.80, 0.80]), few_shot=result("g", [0.70, 0.90])),
        run("second", probe=result("f", [0.70, 0.98]), few_shot=result("g", [0.81, 0.81])),
    ]
    assert first_line(runs).startswith("first and second cannot be told apart")
    assert "; second has the highest mean: probe f 0.840;" in first_line(runs)


@pytest.mark.parametrize(
    "changes", [{"cells": "heldout"}, {"n_scored": 80}, {"scored_digest": "coarser labels"}]
)
def test_runs_scored_on_other_cells_are_not_paired(changes: dict[str, Any]) -> None:
    runs = [
        run("first", probe=result("f", [0.80, 0.81, 0.80])),
        run("second", probe=result("f", [0.90, 0.90, 0.91])),
    ]
    assert [one.is_called_best for one in list_standings(runs)] == [False, True]
    found = runs[0].evaluation
    assert found is not None
    other = Evaluation({"d": replace(found.datasets["d"], **changes)})
    runs[0] = replace(runs[0], evaluation=other)
    assert not any(one.is_called_best for one in list_standings(runs))
    assert first_line(runs).startswith(
        "second has the highest mean on d over the task that all have (probe), but the runs were not scored on the "
        "same cells and labels, with the same options:"
    )


@pytest.mark.parametrize("options", [{"seed": 1}, {"folds": 3}, {"tasks": {"p": {"min_cells": 9}}}])
def test_runs_of_other_draws_are_not_paired(options: dict[str, Any]) -> None:
    runs = []
    for name, values in {"first": [0.80, 0.81, 0.80], "second": [0.90, 0.90, 0.91]}.items():
        runs.append(run(name, probe=replace(result("f", values), task="p")))
    assert [one.is_called_best for one in list_standings(runs)] == [False, True]
    found = runs[0].evaluation
    assert found is not None
    runs[0] = replace(runs[0], evaluation=replace(found, options=options))
    assert not any(one.is_called_best for one in list_standings(runs))


def test_runs_are_compared_over_their_shared_tasks() -> None:
    runs = [
        run("first", probe=result("f", [0.8, 0.81]), clustering=result("ARI", [0.99, 0.99])),
        run("second", probe=result("f", [0.9, 0.9]), few_shot=result("5", [0.1, 0.1])),
    ]
    found = list_standings(runs)
    assert [(one.is_called_best, one.ranking.shared_tasks) for one in found] == [
        (False, ["probe"]),
        (True, ["probe"]),
    ]
    assert "second is best on d over the task that all have (probe): probe f 0.900" in first_line(
        runs
    )


def test_no_run_is_best_without_a_task_that_all_have() -> None:
    runs = [
        run("first", probe=result("f", [0.8, 0.8])),
        run("second", few_shot=result("5", [0.9, 0.9])),
    ]
    assert not any(one.is_called_best for one in list_standings(runs))
    assert (
        first_line(runs)
        == "The runs on d share no task that could rank them, so none is called best."
    )


def test_the_task_where_another_run_is_better_is_named() -> None:
    runs = [
        run("first", probe=result("f", [0.80, 0.80]), leave_out=result("g", [0.5, 0.51])),
        run("second", probe=result("f", [0.83, 0.832]), leave_out=result("g", [0.2, 0.2])),
    ]
    assert [one.is_called_best for one in list_standings(runs)] == [True, False]
    assert first_line(runs).endswith(
        "Better than first in single tasks, with a 95 % interval above 0: second in probe (+0.031)."
    )


def test_a_better_run_is_said_to_have_no_interval_without_pairs() -> None:
    runs = [
        run("first", probe=result("f", [0.80, 0.80]), leave_out=result("g", [0.5])),
        run("second", probe=result("f", [0.83]), leave_out=result("g", [0.2])),
    ]
    assert first_line(runs).endswith(
        "Better than first in single tasks, without an interval, because there are fewer than two paired "
        "repetitions, the error over units is unknown, or nothing varies: second in probe (+0.030)."
    )
    # two repetitions of the other run only are no pairs
    assert not any(one.is_called_best for one in list_standings([*reversed(runs)]))


@pytest.mark.parametrize("shift", [0.0, 0.004, 0.05])
def test_the_interval_over_repetitions_is_a_paired_t_interval(shift: float) -> None:
    generator = np.random.default_rng(0)
    a = generator.normal(0.8, 0.05, 8)
    b = a + generator.normal(shift, 0.01, 8)
    found = find_notable_difference(
        TaskScore(a.mean(), a.tolist(), 0.0), TaskScore(b.mean(), b.tolist(), 0.0)
    )
    assert (found is not None) == (ttest_rel(a, b).pvalue < 0.05)


def test_an_unknown_error_over_units_gives_no_interval() -> None:
    first = TaskScore(0.81, [0.80, 0.81, 0.82], units_se=None)
    second = TaskScore(0.84, [0.83, 0.84, 0.86], units_se=None)
    assert find_notable_difference(second, first) == (pytest.approx(0.03), False)
    known = replace(first, units_se=0.001)
    assert find_notable_difference(second, known) == (pytest.approx(0.03), True)
    tasks = {"first": [0.80, 0.81, 0.80], "second": [0.83, 0.84, 0.83]}
    runs = []
    for name, values in tasks.items():
        runs.append(run(name, probe=replace(result("f", values), differences=[])))
    assert not any(one.is_called_best for one in list_standings(runs))
    assert ", not shown to be beyond chance:" in first_line(runs)


def test_an_interval_that_ends_at_zero_is_not_notable(monkeypatch: pytest.MonkeyPatch) -> None:
    first = TaskScore(0.5, [0.5, 0.5], units_se=0.0)
    second = TaskScore(0.75, [0.75, 0.75], units_se=0.0)
    for half_width, is_notable in ((0.25, False), (0.2499, True)):
        monkeypatch.setattr(ranking, "_compute_half_width", lambda *_, width=half_width: width)
        assert (find_notable_difference(second, first) is not None) == is_notable


def leaders(cells_se: float, n: int | None = None) -> list[str]:
    """The leaders of two runs, the second 0.03 better, with this error over `n` units."""
    scores = {}
    for name, values in (("a", [0.80, 0.81, 0.80]), ("b", [0.83, 0.84, 0.83])):
        scores[name] = score_tasks(make_dataset(probe=result("f", values, 0.5, cells_se, n)), {})
    ranked = rank_runs(scores)
    return [str(ranked.leader), *ranked.tied]


def test_few_cells_widen_the_interval_between_runs() -> None:
    assert leaders(0.003) == ["b"]
    assert leaders(0.03) == ["b", "a"]


def test_few_units_widen_the_interval_between_runs() -> None:
    # 0.01 times Student's quantile: 1.96 of many units, 2.78 of five, 4.30 of three
    assert leaders(0.01, None) == leaders(0.01, 1000) == leaders(0.01, 5) == ["b"]
    assert leaders(0.01, 3) == ["b", "a"]
