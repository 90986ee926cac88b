"""Gates of an evaluation, its tidy scores, and the cost of the embedding."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from reported import make_dataset, make_method, make_row

from cellmill.config.evaluate import BaselineGate
from cellmill.config.options import EvaluateOptions
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.gate import find_failures
from cellmill.runs.results import DatasetResult, Row, Score, TaskResult
from tests.unit.evaluated import evaluate

ROWS = [
    Row(make_method("embedding", "kNN"), {"accuracy": Score(0.7, repetitions=[0.7])}, {"cells": 3}),
    make_row("embedding", "LR", accuracy=0.8),
    make_row("all genes", "kNN", accuracy=0.6),
    make_row("all genes", "LR", accuracy=0.82),
    make_row("majority", accuracy=0.3),
]


def _datasets(**tasks: Any) -> dict[str, DatasetResult]:
    """Results of tasks, each with the changes of ROWS, metric or reason; `of_LABEL` ends names."""
    results = {}
    for name, changes in tasks.items():
        result = TaskResult(ROWS, "accuracy", task=name.removesuffix("_of_donor"))
        results[name.replace("_", " ")] = replace(result, **changes)
    return {"blood": make_dataset(**results)}


def test_a_gate_compares_the_best_rows_by_their_means() -> None:
    datasets = _datasets(probe={}, probe_of_donor={}, other={})
    assert find_failures([BaselineGate(task="probe", baseline="majority")], datasets) == []
    assert (
        find_failures([BaselineGate(task="probe", baseline="all genes", margin=-0.05)], datasets)
        == []
    )
    failed = "embedding + LR has 0.800 accuracy, expected at least 0.820 of all genes + LR"
    assert find_failures([BaselineGate(task="probe", baseline="all genes")], datasets) == [
        f"blood: probe: {failed}",
        f"blood: probe of donor: {failed}",
    ]
    [line] = find_failures([BaselineGate(task="other", baseline="majority", margin=0.6)], datasets)
    assert line == (
        "blood: other: embedding + LR has 0.800 accuracy, expected at least 0.900 (0.300 of majority "
        "plus margin 0.6)"
    )


def test_a_gate_is_not_failed_by_a_rounding_error() -> None:
    rows = [make_row("embedding", accuracy=0.57), make_row("all genes", accuracy=0.56)]
    gate = BaselineGate(task="probe", baseline="all genes", margin=0.01)
    assert gate.margin > 0.57 - 0.56, "in floating point"
    assert find_failures([gate], _datasets(probe={"rows": rows})) == []


def test_the_message_of_a_gate_tells_both_numbers_apart() -> None:
    rows = [make_row("embedding", accuracy=0.8001), make_row("all genes", accuracy=0.8002)]
    datasets = _datasets(probe={"rows": rows})
    [line] = find_failures([BaselineGate(task="probe", baseline="all genes")], datasets)
    assert line.endswith("embedding has 0.8001 accuracy, expected at least 0.8002 of all genes")
    gate = BaselineGate(task="probe", baseline="all genes", margin=0.0001)
    [line] = find_failures([gate], datasets)
    assert line.endswith("expected at least 0.8003 (0.8002 of all genes plus margin 0.0001)")


def test_a_gate_on_an_error_takes_the_lowest_value() -> None:
    method = make_method("a", kind="model")
    errors = [Row(method, numbers={"MAE": value}) for value in (float("nan"), 0.5, 0.4)]
    mean = Row(make_method("mean"), numbers={"MAE": 0.45})
    datasets = _datasets(
        change={
            "rows": [*errors, mean],
            "metric": "MAE",
        }
    )
    assert (
        find_failures(
            [BaselineGate(task="change", baseline="mean", lower_is_better=True)], datasets
        )
        == []
    )
    [line] = find_failures(
        [BaselineGate(task="change", baseline="mean", lower_is_better=True, margin=0.1)], datasets
    )
    assert line == (
        "blood: change: a has 0.400 MAE, expected at most 0.350 (0.450 of mean minus margin 0.1)"
    )


def test_a_gate_knows_the_errors_of_a_result() -> None:
    rows = [make_row("embedding", MAE=0.5), make_row("mean", MAE=0.4)]
    datasets = _datasets(change={"rows": rows, "metric": "MAE", "lower_is_better": ["MAE"]})
    [line] = find_failures([BaselineGate(task="change", baseline="mean")], datasets)
    assert line.endswith("embedding has 0.500 MAE, expected at most 0.400 of mean")


@pytest.mark.parametrize(
    ("gate", "changed", "message"),
    [
        ({"baseline": "PCA"}, {}, "no baseline 'PCA'; there are: all genes"),
        (
            {"baseline": "majority", "column": "F1"},
            {},
            r"no numbers in column 'F1'; there are: accuracy, cells$",
        ),
        (
            {"baseline": "majority"},
            {"metric": None},
            "blood: probe: no column ranks its rows; set column$",
        ),
        (
            {"baseline": "majority"},
            {"skipped": "no label"},
            "task probe was skipped on every dataset: no row to",
        ),
        (
            {"baseline": "majority"},
            {"rows": [row for row in ROWS if row.method.kind != "model"]},
            "blood: probe: the task has no row of the model; remove this gate$",
        ),
    ],
)
def test_a_gate_that_compares_nothing_is_an_error(
    gate: dict[str, Any], changed: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_failures([BaselineGate(task="probe", **gate)], _datasets(probe=changed))


def test_a_gate_on_a_task_that_does_not_run_is_refused() -> None:
    with pytest.raises(
        ValidationError,
        match=r"task 'prob' is not in evaluate\.tasks, which are: probe, reconstruct",
    ):
        EvaluateOptions.model_validate(
            {"evaluate": {"gate": [{"task": "prob", "baseline": "majority"}]}}
        )


@pytest.mark.parametrize(
    ("task", "column", "kept"),
    [
        ("clustering", "ARI, best resolution", "resolution 1"),
        ("low_depth", "10 % of counts, shifted", "30 % of counts"),
        ("missing_genes", "75 genes, matched", "200 genes"),
    ],
)
def test_a_gate_on_a_column_that_effort_fast_lacks_is_refused(
    task: str, column: str, kept: str
) -> None:
    gate = {"task": task, "baseline": "all genes", "column": column}
    given: dict[str, Any] = {"tasks": {task: {}}, "gate": [gate]}
    EvaluateOptions.model_validate({"evaluate": given})
    with pytest.raises(
        ValidationError,
        match=f"gate: effort fast leaves out column '{column}' of task {task}; set effort: full, "
        f"or a column of {kept}",
    ):
        EvaluateOptions.model_validate({"evaluate": given | {"effort": "fast"}})
    gate["column"] = column.replace(column.split(", ")[task == "clustering"], kept)
    EvaluateOptions.model_validate({"evaluate": given | {"effort": "fast"}})


def test_without_a_gate_the_stored_options_are_unchanged() -> None:
    given = EvaluateOptions.model_validate({"evaluate": {}}).evaluate
    assert "gate" not in given.model_dump(mode="json")


def test_a_failed_gate_keeps_the_results(tmp_path: Path, corpus: dict[str, Path]) -> None:
    out = tmp_path / "evaluate" / "metrics.json"
    tasks: dict[str, Any] = {"probe": {"seeds": 1}, "throughput": {}}
    gate = {"task": "probe", "baseline": "majority"}
    with pytest.raises(
        DataError,
        match=r"^evaluate\.gate: simulated: probe: embedding .* all results are in .*finished",
    ):
        evaluate(corpus, out, tasks=tasks, gate=[gate | {"margin": 2}])
    assert not out.exists()
    kept = json.loads((out.parent / "finished" / "metrics.json").read_text())
    evaluated = evaluate(corpus, out, tasks=tasks, gate=[gate | {"margin": -1}])["datasets"][
        "simulated"
    ]["tasks"]
    assert evaluated["probe"]["rows"] == kept["datasets"]["simulated"]["tasks"]["probe"]["rows"]
    [row] = evaluated["throughput"]["rows"]
    numbers = row["numbers"]
    assert numbers["cells"] == 600
    assert numbers["cells per s"] == pytest.approx(600 / numbers["seconds"])
    assert 0.05 < numbers["peak memory, GB"] < 50
    lines = list(csv.DictReader((out.parent / "scores.csv").read_text().splitlines()))
    of_row = [
        line for line in lines if line["name"] == "embedding + kNN" and line["column"] == "accuracy"
    ]
    # a single repetition has no sd
    assert [line["statistic"] + line["repetition"] for line in of_row] == ["mean", "repetition0"]
    rows = {row["name"]: row for row in evaluated["probe"]["rows"]}
    assert float(of_row[0]["value"]) == rows["embedding + kNN"]["scores"]["accuracy"]["mean"]
    assert [line["column"] for line in lines if line["task"] == "throughput"][1] == "seconds"
