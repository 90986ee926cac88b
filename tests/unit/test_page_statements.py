"""What the page says is true of unusual runs too: other best metrics, absent files, links."""

import csv
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from reported import make_row, make_run, write

from cellmill.config.options import ReportOptions
from cellmill.errors import DataError
from cellmill.report.collect import ReportedRun, read_run
from cellmill.report.drawing.cell_counts import make_confusion_chart
from cellmill.report.drawing.curves import StepValues, make_loss_chart
from cellmill.report.drawing.page_charts import PageCharts
from cellmill.report.drawing.svg import draw_svg
from cellmill.report.page import render
from cellmill.report.schemas import PlanSchema, RunRecordSchema, StatusSchema
from cellmill.report.sweeps.rows import LOSS
from cellmill.report.sweeps.scaling_law import Law
from cellmill.report.sweeps.scalings import Scaling, ScalingCurve, SizePoint, SweepCurves
from cellmill.report.verdicts import list_verdicts
from cellmill.runs import results
from cellmill.runs.results import Evaluation, TaskResult, compare
from cellmill.stages import report


def read_text(*runs: Path) -> str:
    """The page of these runs as text."""
    return to_plain_text(render("r", [*map(read_run, runs)], []))


def to_plain_text(page: str) -> str:
    """The page without scripts, style and tags."""
    shown = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", shown)).split())


def test_the_best_checkpoint_is_named_by_its_metric(tmp_path: Path) -> None:
    text = read_text(make_run(tmp_path / "first"))
    assert (
        "run state parameters steps cells seen train loss lowest val loss best by best value best step "
        "first done 1,234,567 199 6,368 – 1.6 val_hidden_genes 0.4321 150 "
        "Best: the checkpoint with the best train.best_metric"
    ) in text
    assert "best val loss" not in text


def test_a_damaged_line_of_the_log_is_to_be_deleted(tmp_path: Path) -> None:
    log = make_run(tmp_path / "run") / "train/metrics.jsonl"
    write(log, '{"step": 1, "loss": 2.0}\n{"step": 3, "gpu_power_w": [null]}\n{"step": 4, "lo')
    with pytest.raises(DataError) as raised:
        read_run(tmp_path / "run")
    assert str(raised.value) == (
        f"{log}: damaged: gpu_power_w.0: input should be a valid number, got None; delete the line of step 3"
    )


def test_a_linked_run_has_the_name_of_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "scratch/run_17")
    runs = tmp_path / "results/runs"
    runs.mkdir(parents=True)
    (runs / "pbmc").symlink_to(tmp_path / "scratch/run_17")
    run = read_run(runs / "pbmc")
    assert run.name == "pbmc"
    trained = "results/runs/pbmc/train"
    assert run.remake_command_by_file["train/status.json"] == (
        f"mv {trained} {trained}.$(date +%s) && snakemake --profile PROFILE {trained}/status.json"
    )
    monkeypatch.chdir(runs / "pbmc")
    assert read_run(Path(".")).name == "run_17"


@pytest.mark.parametrize(
    ("law", "printed"),
    [
        (Law(1.5, 2.0, 0.3449, 0.3, 0.4), "1.5 + 2 × cells −0.3449 ,"),
        (Law(2.25, 1.23456e27, 2.8, 2.7, 2.9), "2.25 + 1.235e+27 × cells −2.8000 ,"),
    ],
)
def test_the_printed_law_is_the_drawn_law(law: Law, printed: str) -> None:
    curve = ScalingCurve("", [SizePoint(1e8, 1.6, None, 1)], law)
    sweep = SweepCurves("s", ["a"], 1, [Scaling("a", "cells", LOSS, [curve], None)])
    assert f" {printed} 95 % interval" in to_plain_text(render("r", [], [], [sweep]))


def test_equal_verdicts_on_two_labels_both_count() -> None:
    verdict = compare("embedding + LR", "all genes + LR", "accuracy, 5 per class", 0.0, (-0.1, 0.1))
    own, baseline = make_row("embedding", "LR"), make_row("all genes", "LR")
    result = TaskResult([own, baseline], verdicts=[verdict], task="few_shot")
    results = {"few_shot": result, "few_shot of donor": result}
    assert [task for task, _ in list_verdicts(results)] == ["few_shot", "few_shot of donor"]
    repeated = {"few_shot": result, "again": replace(result, task="again")}
    assert [task for task, _ in list_verdicts(repeated)] == ["few_shot"]


def test_scores_over_steps_are_of_one_training(tmp_path: Path) -> None:
    exported = {"fingerprint": "f", "objective": {"name": "cell_decoding"}}
    configs = {
        "": exported,
        "steps/1/": exported | {"objective": {"name": "masked_value"}},
        "steps/2/": exported,
        "steps/3/": exported | {"weighted_by": "cell_type"},
    }
    for folder, config in configs.items():
        write(tmp_path / f"{folder}model/config.json", config)
    for step in (1, 2, 3):
        evaluation = Evaluation({}, {"step": step})
        results.write(tmp_path / f"steps/{step}/evaluate/metrics.json", evaluation)
    assert [*read_run(tmp_path).evaluation_by_step] == [2]


def test_an_empty_file_is_not_called_missing() -> None:
    status = StatusSchema(state="done")
    run = ReportedRun("a", PlanSchema(), status, RunRecordSchema(), None, Evaluation({}))
    text = to_plain_text(render("r", [run], []))
    assert "evaluate/metrics.json has no dataset." in text
    assert "train/run.json has no options." in text
    assert "No quantity was planned or measured." in text
    assert "train/metrics.jsonl has no values to draw." in text
    assert "train/cost.json is missing: no cost is known." in text
    missing = re.findall(r"(\S+\.json) is missing", text)
    assert missing == ["train/cost.json", "model/config.json"]


def test_the_page_names_the_folder_of_its_pictures(tmp_path: Path) -> None:
    out = tmp_path / "elsewhere/index.html"
    options = ReportOptions.model_validate({"report": {}})
    report.report(options=options, runs=[make_run(tmp_path / "run")], corpora=[], out=out)
    said = "Pictures and data of the charts are also in the folder figures next to this page."
    assert said in to_plain_text(out.read_text(encoding="utf-8"))
    assert [path.name for path in sorted(out.parent.iterdir())] == ["figures", "index.html"]


def test_files_of_others_stay_in_the_folder_of_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    for name in ("fig1.svg", "001_table.csv", "001_first.pdf"):
        write(folder / name, "mine")
    charts = PageCharts()
    charts.add(make_confusion_chart("first", ["a"], [[1]]))
    charts.save(folder)
    assert (folder / "001_first.svg").exists()
    PageCharts().save(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "001_first.pdf",
        "001_table.csv",
        "charts.json",
        "fig1.svg",
    ]


def test_a_new_chart_overwrites_no_file_of_a_user(tmp_path: Path) -> None:
    write(tmp_path / "001_first.svg", "mine")
    charts = PageCharts()
    charts.add(make_confusion_chart("first", ["a"], [[1]]))
    for _ in range(2):
        charts.save(tmp_path)
        assert (tmp_path / "001_first.svg").read_text() == "mine"
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["001_first.svg", "001_first_.csv", "001_first_.svg", "charts.json"]


@pytest.mark.parametrize("damaged", ["null", "true", "3", '"001_first.svg"', "{}"])
def test_a_damaged_list_of_charts_removes_no_file(tmp_path: Path, damaged: str) -> None:
    write(tmp_path / "001_first.svg", "mine")
    write(tmp_path / "charts.json", damaged)
    with pytest.raises(DataError, match=r"charts\.json: expected a list of file names; delete"):
        PageCharts().save(tmp_path)
    assert (tmp_path / "001_first.svg").exists()


def test_a_saved_picture_keeps_the_texts_of_users(tmp_path: Path) -> None:
    charts = PageCharts()
    charts.add(make_confusion_chart("c", ["currentColor"], [[1]]))
    charts.save(tmp_path)
    svg = (tmp_path / "001_c.svg").read_text()
    assert ">currentColor<" in svg
    assert "#222222" in svg
    assert '"currentColor"' not in svg


def test_options_of_plugins_may_have_any_type(tmp_path: Path) -> None:
    options = {
        "model": {"family": "mlp", "hidden": [64, 32]},
        "objective": {"name": "mine", "batch_column": ["donor", "plate"], "batch_reason": 1},
    }
    folder = make_run(tmp_path / "run")
    write(folder / "train/run.json", {"options": options})
    text = to_plain_text(render("r", [read_run(folder)], []))
    assert "model.hidden 64, 32" in text


@pytest.mark.parametrize("has_validation", [False, True])
def test_losses_of_training_are_dashed_without_validation(has_validation: bool) -> None:
    points: StepValues = [(1, 2.0), (2, 1.0)]
    validation = points if has_validation else []
    chart = make_loss_chart("Loss", {"a": {"training": points, "validation": validation}})
    svg = draw_svg(chart.full_spec | {"width": 300, "data": {"values": chart.rows}}, 0)
    lines = re.findall(r'<path[^>]*stroke="#4e79a7"[^>]*stroke-dasharray="([^"]*)"', svg)
    assert set(lines) == ({"3,3", "1,0"} if has_validation else {"3,3"})
    legend = chart.spec["encoding"]["strokeDash"]["legend"]["values"]
    assert legend == (["validation", "training"] if has_validation else ["training"])


def test_a_label_with_a_carriage_return_is_one_cell(tmp_path: Path) -> None:
    labels = ["\r=1+1", "B\rcell", 'a,"b"\n', "-x"]
    charts = PageCharts()
    charts.add(make_confusion_chart("c", labels, np.eye(4, dtype=int).tolist()))
    charts.save(tmp_path)
    with open(tmp_path / "001_c.csv", encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    escaped = ["'\r=1+1", "B\rcell", 'a,"b"\n', "'-x"]
    assert [(row["true"], row["predicted"], row["cells"]) for row in rows] == [
        (label, label, "1") for label in escaped
    ]
