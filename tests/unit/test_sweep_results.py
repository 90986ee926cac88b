"""Results of a sweep: curves over sizes, and the law only where the data support one."""

import csv
import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from reported import make_dataset, make_method, write

from cellmill.cli import main
from cellmill.report.collect import ReportedRun
from cellmill.report.drawing.page_charts import PageCharts
from cellmill.report.page import render
from cellmill.report.schemas import LoggedLineSchema, PlanSchema, RunRecordSchema
from cellmill.report.side_by_side import compare_runs
from cellmill.report.sweeps.rows import LOSS, SweepRow, list_rows
from cellmill.report.sweeps.scaling_law import Law, NoLaw, fit_law
from cellmill.report.sweeps.scalings import TRAIN_FRAC, SweepCurves, make_scalings, read_sweep
from cellmill.runs import results
from cellmill.runs.results import Difference, Evaluation, Row, Score, TaskResult, compare

SIZES = (100, 300, 1000, 3000)
VALUES = {
    f"s-{n}-{seed}": {"stream.train_frac": n / 3000, "train.seed": seed}
    for n in SIZES
    for seed in (0, 1)
}


def write_runs(folder: Path) -> None:
    for name, values in VALUES.items():
        n = round(3000 * values["stream.train_frac"])
        seed = values["train.seed"]
        loss = 1.5 + 40 * n**-0.5 + (0.002 if seed else -0.002)
        rows = [
            Row(make_method(features, "kNN"), {"macro_f1": Score(mean, 0.1)})
            for features, mean in (("embedding", 0.5 + 0.1 * seed), ("PCA50", 0.7))
        ]
        probe = TaskResult(rows, "macro_f1")
        reconstruct = TaskResult(figures={"cross_entropy": 10 - loss, "n_cells": 90})
        dataset = make_dataset(reconstruct=reconstruct, probe=probe)
        (folder / name / "evaluate").mkdir(parents=True)
        results.write(folder / name / "evaluate/metrics.json", Evaluation({"pbmc": dataset}))
        files = {
            "plan.json": {"parameters": 7, "cells": n, "steps": 5, "cells_seen": 160},
            # the checkpoint with the best train.best_metric has another loss
            "train/status.json": {"best_val_loss": 9.0, "best_value": 0.5, "best_step": 2},
            "train/metrics.jsonl": "".join(
                json.dumps({"step": step, "val_loss": value}) + "\n"
                for step, value in ((2, 9.0), (4, loss), (6, float("nan")))
            ),
        }
        for path, content in files.items():
            write(folder / name / path, content)


def test_runs_of_a_sweep_share_one_table(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs")
    (tmp_path / "values.json").write_text(json.dumps(VALUES))
    out = tmp_path / "sweeps" / "s" / "results.csv"
    assert (
        main(f"sweep --values {tmp_path}/values.json --runs {tmp_path}/runs --out {out}".split())
        == 0
    )
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == 8 * 5
    assert rows[3] | {"run": "", "value": ""} == {
        "run": "", "stream.train_frac": str(100 / 3000), "train.seed": "0", "parameters": "7", "cells": "100",
        "steps": "5", "cells_seen": "160", "gpu_hours": "", "cpu_core_hours": "", "dataset": "pbmc", "task": "probe",
        "name": "embedding + kNN", "kind": "model", "metric": "macro_f1", "value": "", "sd": "0.1",
    }  # fmt: skip
    loss, probe, entropy = json.loads((out.parent / "curves.json").read_text())["scalings"]
    assert entropy["measure"]["metric"] == "cross_entropy", "what is alike in all runs has no curve"
    assert (probe["size_column"], probe["baseline"]) == (
        "cells",
        {"name": "PCA50 + kNN", "value": pytest.approx(0.7)},
    )
    (curve,) = probe["curves"]
    assert [point["size"] for point in curve["points"]] == list(SIZES)
    assert [(p["mean"], p["sd"], p["n"]) for p in curve["points"]] == [
        (pytest.approx(0.55), pytest.approx(0.0707, abs=1e-4), 2)
    ] * 4
    law = loss["curves"][0]["law"]
    assert law["exponent_low"] < 0.5 < law["exponent_high"]
    assert law["floor"] == pytest.approx(1.5, abs=0.05)
    charts = PageCharts(1)
    page = render("r", [], [], [read_sweep(out.parent / "curves.json")], charts)
    headings = re.findall(r"<h4>(.*?)(?: <|</h4>)", page, re.DOTALL)
    assert [heading for heading in headings if "loss" in heading or "f1" in heading] == [
        "validation: lowest val loss",
        "probe, pbmc: macro f1",
    ]
    titles = [chart.title for chart, _ in charts.charts]
    assert titles[:2] == [
        "s, validation: lowest val loss over cells (stream.train_frac)",
        "s, probe pbmc: macro f1 over cells (stream.train_frac)",
    ]


def test_fractions_are_the_sizes_if_numbers_of_cells_are_unknown() -> None:
    rows = []
    for train_frac in (0.5, 1.0):
        columns = {TRAIN_FRAC: train_frac, "cells": None, "parameters": None}
        rows.append(SweepRow(columns, LOSS, "model", 2.0))
    [scaling] = make_scalings(rows, [TRAIN_FRAC])
    assert scaling.size_column == TRAIN_FRAC
    assert [point.size for point in scaling.curves[0].points] == [0.5, 1.0]


def test_a_sweep_has_the_best_of_its_runs_best_baselines() -> None:
    own, untrained, pca = (make_method(name, "kNN") for name in ("embedding", "untrained", "PCA"))
    means = {own: 0.9, untrained: 0.8, pca: 0.7}
    ahead = compare(own.name, untrained.name, "f", 0.1, (0.05, 0.15))
    level = replace(ahead, outcome="level")
    differences = [
        Difference("f", own.name, untrained.name, 0.1, 0.05, 0.15, 0.0),
        Difference("f", own.name, pca.name, 0.2, 0.1, 0.3, 0.0),
    ]
    for second, best in ((ahead, "PCA + kNN"), (level, "untrained + kNN")):
        sweep_rows = []
        for size, verdict in enumerate((ahead, second), start=1):
            rows = [Row(method, {"f": Score(mean + size / 100)}) for method, mean in means.items()]
            result = TaskResult(rows, "f", [verdict], differences=differences)
            evaluation = Evaluation({"d": make_dataset(probe=result)})
            run = ReportedRun(str(size), None, None, None, None, evaluation)
            sweep_rows += list_rows(run, {"model.layers": size})
        [scaling] = make_scalings(sweep_rows, ["model.layers"])
        assert scaling.baseline is not None
        assert scaling.baseline.name == best


def test_a_column_of_errors_has_a_curve_of_its_lowest_row() -> None:
    sweep_rows = []
    for layers in (1, 2):
        rows = []
        for classifier, error in (("kNN", 0.3), ("ridge", 0.1)):
            scores = {"MAE": Score(error / layers)}
            rows.append(Row(make_method("embedding", classifier), scores))
        result = TaskResult(rows, lower_is_better=["MAE"])
        evaluation = Evaluation({"d": make_dataset(fit=result)})
        run = ReportedRun(str(layers), None, None, None, None, evaluation)
        sweep_rows += list_rows(run, {"model.layers": layers})
    [scaling] = make_scalings(sweep_rows, ["model.layers"])
    assert scaling.measure.row == "embedding + ridge"


def test_a_curve_is_named_by_its_other_axes_and_values() -> None:
    rows = []
    for lr in (0.01, 0.1):
        for layers in (1, 2):
            columns = {"model.layers": layers, "train.lr": lr, "parameters": None}
            rows.append(SweepRow(columns, LOSS, "model", lr / layers))
    scaling, _ = make_scalings(rows, ["model.layers", "train.lr"])
    assert [curve.name for curve in scaling.curves] == ["train.lr 0.01", "train.lr 0.1"]


def test_two_axes_of_parameters_have_different_headings() -> None:
    axes = ["model.hidden", "model.layers"]
    rows = []
    for parameters, sizes in enumerate(product((64, 128), (1, 2))):
        columns = {"parameters": parameters, **dict(zip(axes, sizes))}
        rows.append(SweepRow(columns, LOSS, "model", 1 / (1 + parameters)))
    charts = PageCharts(1)
    page = render("r", [], [], [SweepCurves("s", axes, 4, make_scalings(rows, axes))], charts)
    headings = re.findall(r"<h4>(.*?)</h4>", page, re.DOTALL)
    titles = [f"over parameters ({axis})" for axis in axes]
    assert [re.sub("<.*?>", "", heading).strip() for heading in headings] == [
        f"validation: lowest val loss {title}" for title in titles
    ]
    assert [chart.title for chart, _ in charts.charts] == [
        f"s, validation: lowest val loss {title}" for title in titles
    ]


def test_sizes_without_a_loss_or_score_are_not_denied() -> None:
    page = render("r", [], [], [SweepCurves("s", ["model.layers"], 2, [])])
    assert "and a\nvalidation loss or a value that differs between runs" in page


def test_scores_of_tasks_without_a_metric_are_in_the_table() -> None:
    rows = [
        Row(make_method("embedding"), {"kBET": Score(0.25, 0.1)}, {"iLISI": 0.5, "n": None}),
        Row(make_method("PCA50"), numbers={"iLISI": 0.75}),
    ]
    integration = TaskResult(rows, figures={"n_cells": 90})
    run = ReportedRun(
        "a", None, None, None, None, Evaluation({"d": make_dataset(integration=integration)})
    )
    found = [row.to_csv_row() for row in list_rows(run, {})]
    keys = ("task", "name", "kind", "metric", "value", "sd")
    assert [tuple(row[key] for key in keys) for row in found] == [
        ("integration", "embedding", "model", "kBET", 0.25, 0.1),
        ("integration", "embedding", "model", "iLISI", 0.5, None),
        ("integration", "PCA50", "baseline", "iLISI", 0.75, None),
    ]
    [table] = compare_runs([run])
    assert table.rows == [(run, "d", {"kBET": 0.25, "iLISI": 0.5})]


def test_seconds_of_a_task_are_no_result() -> None:
    result = TaskResult(figures={"n_targets": 5, "seconds": 1.5})
    evaluation = Evaluation({"d": make_dataset(reconstruct=result)})
    run = ReportedRun("a", None, None, None, None, evaluation)
    assert [row.measure.metric for row in list_rows(run, {})] == ["n_targets"]
    assert [table.columns for table in compare_runs([run])] == [["n_targets"]]


def test_figures_of_skipped_tasks_are_not_in_the_table() -> None:
    skipped = TaskResult(figures={"n_batches": 1}, skipped="expected two batches or more, got 1")
    evaluation = Evaluation({"d": make_dataset(integration=skipped)})
    assert list_rows(ReportedRun("a", None, None, None, None, evaluation), {}) == []


def test_a_law_is_fitted_only_over_sizes() -> None:
    for axis, has_law in (("train.lr", False), ("train.steps", True)):
        rows = []
        for size in (1, 2, 4):
            columns = {axis: size, "cells": 9, "parameters": 9}
            rows.append(SweepRow(columns, LOSS, "model", 1 + 1 / size))
        [scaling] = make_scalings(rows, [axis])
        [curve] = scaling.curves
        assert [point.size for point in curve.points] == [1, 2, 4]
        assert (curve.law is not None) == has_law


@pytest.mark.full
def test_a_law_is_fitted_only_where_the_data_support_one() -> None:
    sizes = np.repeat([100, 300, 1000, 3000, 10_000], 2)
    noise = np.random.default_rng(0).normal(0, 0.003, 10)
    law = fit_law(sizes, (1.2 + 30 * sizes**-0.45) * np.exp(noise))
    assert isinstance(law, Law)
    assert law.exponent_low <= 0.45 + 0.005
    assert law.exponent_high >= 0.45 - 0.005
    assert law.floor == pytest.approx(1.2, abs=0.03)
    flat = fit_law(sizes, 2 + noise)
    assert isinstance(flat, NoLaw)
    assert flat.reason.startswith("the exponent is not determined: 95 % interval 0.00 to")
    assert fit_law(sizes[:6], 2 + noise[:6]) == NoLaw("3 sizes; a law with a floor needs 4")
    assert fit_law(sizes, noise) == NoLaw("a loss or size is not a positive finite number")


def test_sizes_of_other_objectives_are_no_curve_of_parameters() -> None:
    rows = []
    for number, objective in enumerate(("cell_decoding", "denoise", "masked_value", "distill")):
        options = {"objective": {"name": objective}}
        record = RunRecordSchema.model_validate({"options": options})
        plan = PlanSchema(parameters=100 + number)
        lines = [LoggedLineSchema(step=1, val_loss=2.0 + number)]
        run = ReportedRun(objective, plan, None, record, None, None, logged_lines=lines)
        rows += list_rows(run, {"objective.name": objective})
    assert make_scalings(rows, ["objective.name"]) == []


def test_named_points_of_one_objective_are_sizes() -> None:
    rows = []
    for name, parameters in (("small", 10), ("large", 1000)):
        plan = PlanSchema(parameters=parameters)
        lines = [LoggedLineSchema(step=1, val_loss=1.0)]
        run = ReportedRun(name, plan, None, None, None, None, logged_lines=lines)
        rows += list_rows(run, {"width": name})
    [scaling] = make_scalings(rows, ["width"])
    assert scaling.size_column == "parameters"
    assert [point.size for point in scaling.curves[0].points] == [10, 1000]


def test_an_incomplete_grid_has_the_curves_of_the_whole_one() -> None:
    rows = []
    for lr, (hidden, parameters) in product((0.1, 0.2), ((16, 100), (32, 300))):
        columns = {"train.lr": lr, "model.hidden": hidden, "parameters": parameters}
        rows.append(SweepRow(columns, LOSS, "model", lr))
    axes = ["train.lr", "model.hidden"]
    for part in (rows, rows[:3]):
        columns = [scaling.size_column for scaling in make_scalings(part, axes)]
        assert columns == ["train.lr", "parameters"]


def test_values_of_one_size_are_not_averaged_as_seeds() -> None:
    rows = []
    for train_frac, loss in ((0.101, 1.0), (0.102, 2.0)):
        columns = {TRAIN_FRAC: train_frac, "cells": 10, "parameters": 7}
        rows.append(SweepRow(columns, LOSS, "model", loss))
    [scaling] = make_scalings(rows, [TRAIN_FRAC])
    assert [(p.size, p.mean, p.sd, p.n) for p in scaling.curves[0].points] == [
        (10, 1.0, None, 1),
        (10, 2.0, None, 1),
    ]
