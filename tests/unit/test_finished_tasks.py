"""Results of finished tasks are kept, and computed again only if what they depend on changed."""

import json
import shutil
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from cellmill.config import plugin
from cellmill.config.parts.tasks import TaskConfig
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate import finished
from cellmill.evaluate.evaluated_datasets import DatasetFiles, EvaluatedDatasets
from cellmill.evaluate.finished import FinishedTasks
from cellmill.evaluate.task import Context
from cellmill.runs import results
from cellmill.runs.results import TaskResult
from tests.unit.evaluated import evaluate, make_context, with_config, with_obs

TASKS: dict[str, Any] = {"probe": {"seeds": 1}, "reconstruct": {}}
EARLIER = ": finished earlier"
TOYS = Path(__file__).parents[1] / "plugin" / "cellmill_toy"


class FragileConfig(TaskConfig):
    """Options of a task that may fail, or lack a package."""

    implementation = f"{__name__}:Fragile"
    name: Literal["fragile"] = "fragile"
    fails: bool = False
    package: str | None = None

    def packages(self) -> dict[str, str]:
        return {self.package: "extra"} if self.package else {}


class Fragile:
    def __init__(self, config: FragileConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        if self.config.fails:
            raise ValueError("as asked")
        return TaskResult(figures={"cells": context.reader.n_obs})


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fragile task, as of an installed package."""
    point = EntryPoint("fragile", f"{__name__}:FragileConfig", "cellmill.task")
    monkeypatch.setattr(
        plugin, "entry_points", lambda group: [point] if group == "cellmill.task" else []
    )


def read_earlier(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Names of the tasks that the log says were finished earlier."""
    names = []
    for line in capsys.readouterr().out.splitlines():
        if EARLIER in line:
            names.append(line.partition(EARLIER)[0].partition(": ")[2])
    return names


def test_another_option_of_one_task_repeats_only_that_task(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kept" / "metrics.json"
    evaluate(corpus, out, tasks=TASKS)
    assert read_earlier(capsys) == []
    changed = TASKS | {"reconstruct": {"objective": {"mask_frac": 0.3}}}
    found = evaluate(corpus, out, tasks=changed)
    assert read_earlier(capsys) == ["probe"]
    assert found == evaluate(corpus, tmp_path / "new" / "metrics.json", tasks=changed)


@pytest.mark.parametrize("n_threads", [1, 2], ids=["in turn", "in processes"])
def test_a_failing_task_loses_only_itself(
    corpus: dict[str, Path],
    tmp_path: Path,
    fragile: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    n_threads: int,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    out = tmp_path / "metrics.json"
    with pytest.raises(DataError, match="task 'fragile' failed"):
        evaluate(corpus, out, tasks={"fragile": {"fails": True}, "reconstruct": {}})
    failure = "task 'fragile' failed (ValueError: as asked)"
    remedy = "its traceback is above; repair or report it, or take the task out of evaluate.tasks; the other"
    assert f"{failure}; {remedy}" in capsys.readouterr().out
    evaluate(corpus, out, tasks={"fragile": {}, "reconstruct": {}})
    assert read_earlier(capsys) == ["reconstruct"]


@pytest.mark.parametrize("n_threads", [1, 2], ids=["in turn", "in processes"])
def test_every_task_that_fails_is_named(
    corpus: dict[str, Path],
    tmp_path: Path,
    fragile: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    n_threads: int,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    one_class = with_obs(corpus, tmp_path, "elsewhere", mine=np.full(600, "a", dtype=object))
    tasks = {"fragile": {"fails": True}, "probe": {}}
    with pytest.raises(DataError) as raised:
        evaluate(one_class, tmp_path / "metrics.json", "mine", cells="all", tasks=tasks)
    told = f"{capsys.readouterr().out}{raised.value}"
    assert "task 'fragile' failed (ValueError: as asked)" in told
    assert "expected two classes or more for task probe" in told
    assert told.count("; the other tasks go on") == 1


def test_the_last_metrics_outlive_an_interrupted_rerun(
    corpus: dict[str, Path], tmp_path: Path, fragile: None
) -> None:
    out = tmp_path / "metrics.json"
    evaluate(corpus, out, tasks={"fragile": {}})
    complete = results.read(out)
    out.unlink()  # as Snakemake does before a rerun
    with pytest.raises(DataError, match="task 'fragile' failed"):
        evaluate(corpus, out, tasks={"fragile": {"fails": True}})
    assert results.read(tmp_path / "finished" / "metrics.json") == complete


def test_a_missing_package_is_found_before_any_task_runs(
    corpus: dict[str, Path], tmp_path: Path, fragile: None, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = {"reconstruct": {}, "fragile": {"package": "no_such_module"}}
    message = (
        r"^evaluate.tasks.fragile requires no_such_module, which is missing: pip install "
        r"'cellmill\[extra\]', or take it out of evaluate.tasks$"
    )
    with pytest.raises(ConfigError, match=message):
        evaluate(corpus, tmp_path / "metrics.json", tasks=tasks)
    assert "reconstruct" not in capsys.readouterr().out


def test_another_seed_or_other_cells_repeat_every_task(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "metrics.json"
    few: dict[str, Any] = {"tasks": {"reconstruct": {}}}
    evaluate(corpus, out, **few)
    evaluate(corpus, out, seed=1, **few)
    other = with_obs(corpus, tmp_path, "simulated", note="changed")
    evaluate(other, out, **few)
    assert read_earlier(capsys) == []


def test_another_export_repeats_every_task(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "metrics.json"
    few: dict[str, Any] = {"tasks": {"reconstruct": {}}}
    evaluate(corpus, out, **few)
    model = with_config(shutil.copytree(corpus["model"], tmp_path / "model"), step=7)
    evaluate(corpus | {"model": model}, out, **few)
    assert read_earlier(capsys) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"rows": 3}'])
def test_a_damaged_result_is_computed_again(
    corpus: dict[str, Path], tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "metrics.json"
    few: dict[str, Any] = {"tasks": {"reconstruct": {}}}
    first = evaluate(corpus, out, **few)
    [path] = (tmp_path / "finished").glob("*.task.json")
    path.write_text(text)
    assert evaluate(corpus, out, **few) == first
    assert read_earlier(capsys) == []
    assert json.loads(path.read_text())["figures"]["n_cells"] > 0


def test_an_unchanged_evaluation_runs_no_task(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "metrics.json"
    few: dict[str, Any] = {"tasks": {"reconstruct": {}, "throughput": {}}}
    first = evaluate(corpus, out, **few)
    capsys.readouterr()
    assert evaluate(corpus, out, **few) == first
    assert read_earlier(capsys) == ["reconstruct", "throughput"]


def test_another_number_of_left_out_seeds_is_told(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "metrics.json"
    for seeds in (5, 10):
        found = evaluate(corpus, out, effort="fast", tasks={"probe": {"seeds": seeds}})
        probe = found["datasets"]["simulated"]["tasks"]["probe"]
        expected = f"{seeds - 1} of {seeds} seeds"
        assert probe["figures"]["left_out"] == expected
        assert f"Effort fast left out {expected}." in probe["notes"]
    assert read_earlier(capsys) == []


def test_a_label_of_another_dataset_is_a_dependency(
    corpus: dict[str, Path], context: Context, tmp_path: Path
) -> None:
    def path(label: str) -> Path:
        one = DatasetFiles(corpus["cells"], corpus["embedding"], ["cell_type"])
        files = {"one": one, "two": replace(one, labels=[label])}
        datasets = EvaluatedDatasets(files, "weights", 8)
        config = FragileConfig(name="fragile")
        options = context.options.model_copy(update={"tasks": {"fragile": config}})
        changed = replace(context, options=options)
        return FinishedTasks(tmp_path, datasets).path("fragile", Fragile(config), changed, None)

    assert path("cell_type") == path("cell_type") != path("batch")  # `transfer` reads it


def test_an_edited_plug_in_repeats_the_task(
    corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "family": ("toy", "options:ToyFamily"),
        "objective": ("toy_next_gene", "options:ToyNextGene"),
        "tokenizer": ("toy_genes", "options:ToyGenes"),
        "classifier": ("toy_centroid", "classifier:toy_centroid"),
    }
    points = {}
    for kind, (name, value) in values.items():  # each in a package of its own
        folder = shutil.copytree(TOYS, tmp_path / f"edited_{kind}")
        for path in folder.glob("*.py"):
            path.write_text(path.read_text().replace("cellmill_toy", folder.name))
        points[f"cellmill.{kind}"] = EntryPoint(name, f"{folder.name}.{value}", f"cellmill.{kind}")
    monkeypatch.setattr(
        plugin, "entry_points", lambda group: [points[group]] if group in points else []
    )
    monkeypatch.syspath_prepend(tmp_path)
    tokens = {"tokenizer": "toy_genes"}
    context = make_context(tmp_path, corpus, tokens=tokens, family="toy", objective="toy_next_gene")
    config = FragileConfig(name="fragile")
    chosen = {"tasks": {"fragile": config}, "classifiers": ["toy_centroid"]}
    context = replace(context, options=context.options.model_copy(update=chosen))
    tasks = FinishedTasks(tmp_path, EvaluatedDatasets({}, "weights", 8))

    def path() -> Path:
        finished._digest_files.cache_clear()
        return tasks.path("fragile", Fragile(config), context, None)

    for kind in values:
        before = path()
        assert before == path()
        (tmp_path / f"edited_{kind}" / "__init__.py").write_text("# edited\n")
        assert before != path(), kind
        before = path()
        (tmp_path / f"edited_{kind}" / "table.tsv.gz").write_bytes(b"data of the package")
        assert before != path(), kind

    # the classifier is a library's class that the package only names
    module = tmp_path / "named_classifier.py"
    module.write_text("from sklearn.svm import SVC as toy_centroid\n")
    points["cellmill.classifier"] = EntryPoint(
        "toy_centroid", "named_classifier:toy_centroid", "cellmill.classifier"
    )
    before = path()
    module.write_text("from sklearn.svm import LinearSVC as toy_centroid\n")
    assert before != path()
