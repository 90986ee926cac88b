"""Each key of each file that the page reads, replaced by each JSON type, gives a page or one line."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from reported import make_corpus, make_run, write

from cellmill.errors import DataError
from cellmill.report.collect import read_corpus, read_run
from cellmill.report.drawing.chart import Chart
from cellmill.report.drawing.page_charts import PageCharts
from cellmill.report.page import render
from cellmill.report.sweeps.scalings import read_sweep

VALUES: tuple[Any, ...] = (None, True, 0, 2.5, "x", [], [1], {}, {"a": 1})
INFINITE = (float("nan"), float("inf"), -float("inf"))
START = {
    "job_id": "7", "partition": "gpu", "state": "COMPLETED", "submitted_at": 1.0, "started_at": 2.0, "ended_at": 3.0,
    "queue_wait_s": 1.0, "elapsed_s": 1.0, "nodes": 1, "processes": 1, "gpus": 1, "cpus": 4,
}  # fmt: skip
TOTALS = (
    "gpu_hours",
    "cpu_core_hours",
    "elapsed_s",
    "queue_wait_s",
    "training_s",
    "training_efficiency_frac",
    "cpu_efficiency_frac",
)
LAW = {"floor": 1, "factor": 2, "exponent": 0.5, "exponent_low": 0.4, "exponent_high": 0.6}
CURVES = [
    {"name": "", "points": [{"size": 1, "mean": 2, "sd": None, "n": 1}], "law": LAW},
    {"name": "a", "points": [{"size": 1, "mean": 2, "sd": 1, "n": 2}], "law": {"reason": "few"}},
]
SCALING = {
    "axis": "a",
    "quantity": "cells",  # as earlier versions called the size column
    "measure": {"dataset": "", "task": "validation", "row": "model", "metric": "val_loss"},
    "curves": CURVES,
    "baseline": {"name": "b", "value": 1},
}
RUN_FILES: dict[str, Any] = {
    "plan.json": {
        "parameters": 7, "memory": {"total_bytes": 9}, "steps": 5, "steps_per_epoch": 2, "hours": 0.1, "cells": 90,
        "cells_seen": 160, "world_size": 1,
    },
    "train/status.json": {
        "state": "done", "step": 5, "cells": 160, "train_loss": 1.5, "best_value": 1.4, "best_step": 4, "wall_s": 9,
        "skipped_steps": 0, "world_size": 1,
    },
    "train/run.json": {
        "options": {
            "objective": {"name": "masked_value"}, "model": {"family": "profile", "hidden": 512},
            "train": {"lr": 0.1, "best_metric": "val_loss"},
        },
        "environment": {"torch": "2"}, "fingerprint": "f", "supervised_by": ["label"],
    },
    "model/config.json": {"fingerprint": "f", "supervised_by": ["label"]},
    "train/cost.json": {
        "source": "own files", "jobs": [START], "totals": dict.fromkeys(TOTALS, 1.0), "unknown": {"max_memory_gb": "x"},
    },
    "train/metrics.jsonl": {
        "step": 1, "loss": 2, "val_loss": 2, "effective_rank": 1, "lr": 1, "grad_norm": 1, "cells_per_s": 1,
        "data_wait_frac": 0, "mfu": 0, "peak_allocated_gb": [1], "peak_resident_gb": [1], "gpu_busy_frac": [1],
        "gpu_power_w": [1], "depth_r2": 0, "batch_r2": 0,
    },
    "bridges/pbmc.cell-eval2.json": {
        "package": "cell-eval2", "version": "0.20.0", "dataset": "pbmc", "model_digest": "abc",
        "rows": [{"name": "mean", "kind": "baseline", "metric": "pds_cosine", "value": 0.5}],
    },
}  # fmt: skip
QC = {
    "source": {"source": "s", "licence": "l", "counts_rule": "round", "n_rounded": 3},
    "coverage": {"reference": "human", "ortholog_frac": 0.5, "notes": ["note"]},
    "labels": {"type": {"renamed": {"A": 1}, "kept": {"B": 1}, "made_missing": {}}},
    "no_label": {"type": {"unknown": 3}},
    "notes": ["note"],
}
SWEEP = {"name": "s", "axes": ["a"], "n_runs": 2, "scalings": [SCALING]}


class Undrawn(PageCharts):
    """Charts without pictures, which would take most of the time."""

    def add(self, chart: Chart) -> Markup:
        json.dumps([chart.full_spec, chart.rows], allow_nan=False)
        return Markup()


def damages(content: Any) -> Iterator[Any]:
    """The content with each value, at any depth, replaced by each of VALUES. Only the first of a
    list is.
    """
    yield from VALUES
    keys = [*content] if isinstance(content, dict) else [0] * (content != [])
    for key in keys if isinstance(content, dict | list) else []:
        for damaged in damages(content[key]):
            changed = copy.copy(content)
            changed[key] = damaged
            yield changed


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A run and a corpus with every key, and a sweep."""
    run = make_run(tmp_path / "run")
    for file, content in RUN_FILES.items():
        end = "\n" if file.endswith("l") else ""
        write(run / file, json.dumps(content) + end)
    metrics = json.loads((run / "evaluate/metrics.json").read_text())
    metrics["model"] |= {"step": 4, "supervised_by": ["label"]}
    write(run / "evaluate/metrics.json", metrics)
    write(run / "steps/2/evaluate/metrics.json", metrics | {"model": {"step": 2}})
    write(run / "steps/2/model/config.json", RUN_FILES["model/config.json"])
    cells = make_corpus(tmp_path / "corpus") / "cells/pbmc.json"
    report = json.loads(cells.read_text())
    for key, value in QC.items():
        report[key] = report.get(key, {}) | value if isinstance(value, dict) else value
    write(cells, report)
    write(tmp_path / "curves.json", SWEEP)
    return tmp_path


def read_and_render(folder: Path) -> str:
    run = read_run(folder / "run")
    corpus = read_corpus(folder / "corpus")
    return render("r", [run], [corpus], [read_sweep(folder / "curves.json")], Undrawn())


@pytest.mark.parametrize(
    "file",
    [
        *(f"run/{file}" for file in RUN_FILES),
        "run/steps/2/model/config.json",
        "corpus/cells/pbmc.json",
        "corpus/shards/manifest.json",
        "curves.json",
        pytest.param("run/evaluate/metrics.json", marks=pytest.mark.full),
        pytest.param("run/steps/2/evaluate/metrics.json", marks=pytest.mark.full),
    ],
)
def test_a_wrong_type_at_any_key_is_a_page_or_one_line(folders: Path, file: str) -> None:
    path = folders / file
    whole = json.loads(path.read_text())
    assert "Overview" in read_and_render(folders)
    errors = []
    for damaged in damages(whole):
        end = "\n" if file.endswith("l") else ""
        path.write_text(json.dumps(damaged) + end)
        try:
            read_and_render(folders)
        except DataError as error:
            errors.append(str(error))
    assert len(errors) > len(VALUES) / 2
    for error in errors:
        assert error.startswith(f"{path}: ")
        assert "\n" not in error


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("run/evaluate/metrics.json", ("datasets", "pbmc", "tasks", "probe", "figures", "folds")),
        ("corpus/cells/pbmc.json", ("histograms", "n_genes", "edges", 0)),
        ("curves.json", ("scalings", 0, "curves", 0, "points", 0, "mean")),
    ],
)
def test_a_number_that_is_not_finite_is_one_line(
    folders: Path, file: str, keys: tuple[Any, ...]
) -> None:
    path = folders / file
    content = json.loads(path.read_text())
    *parents, last = keys
    holder = content
    for key in parents:
        holder = holder[key]
    for value in INFINITE:
        holder[last] = value
        path.write_text(json.dumps(content))
        with pytest.raises(DataError) as raised:
            read_and_render(folders)
        message = f"{path}: damaged: a number is NaN or infinite; make it again"
        assert str(raised.value) == message
