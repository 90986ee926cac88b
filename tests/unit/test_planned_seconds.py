"""Seconds of tasks are planned before they start, and change no result."""

import json
import re
from dataclasses import replace
from importlib.metadata import EntryPoint
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

import cellmill.config.parts.tasks  # noqa: F401  # registers the built-in tasks
from cellmill.config import plugin
from cellmill.config.parts.tasks import TaskConfig
from cellmill.config.plugin import BUILT_IN
from cellmill.evaluate.seconds import planned as planned_module
from cellmill.evaluate.seconds.planned import LearnedRatios, Planner, describe_plan
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.task import Context, Task
from cellmill.runs.results import TaskResult
from tests.unit.evaluated import evaluate

WORK = DatasetSizes(
    dataset="screen",
    n_cells=1_000,
    n_obs=4_000,
    n_genes=20_000,
    genes_per_cell=2_000,
    n_training=3_000,
    n_values={"label": 8, "batch": 3, "donor": 4, "perturbation": 11, "is_control": 2},
    n_external=0,
    folds=5,
    forward_s=0.01,
)
EDGES = "A\tB\nA\tC\n"
SETS = "first\t-\tA\tB\nsecond\t-\tC\tD\n"
NEEDED: dict[str, dict[str, Any]] = {
    "gene_embedding": {"gene_sets": "sets.gmt"},
    "grn": {"edges": "edges.tsv"},
    "transfer": {"fit_on": ["atlas"]},
}
LARGER: dict[str, list[dict[str, Any]]] = {
    "n_cells": [{"name": name} for name in ("probe", "few_shot", "leave_out", "low_depth")]
    + [{"name": name} for name in ("missing_genes", "imputation", "map", "clustering")]
    + [{"name": name} for name in ("integration", "transfer", "reconstruct")],
    "n_obs": [{"name": "perturbation"}],
    "n_training": [{"name": name} for name in ("gene_embedding", "grn")],
}
MORE = [
    ("probe", {"seeds": 1}, {"seeds": 2}),
    ("few_shot", {"draws": 2}, {"draws": 3}),
    ("few_shot", {"shots": [5]}, {"shots": [5, 10]}),
    ("leave_out", {"roles": ["donor"]}, {"roles": ["donor", "batch"]}),
    ("low_depth", {"repeats": 1}, {"repeats": 2}),
    ("missing_genes", {"genes": [200]}, {"genes": [200, 75]}),
    ("imputation", {"most_folds": 2}, {"most_folds": 3}),
    ("map", {"max_types": 1}, {"max_types": 2}),
    ("clustering", {"seeds": 1}, {"seeds": 2}),
    ("clustering", {"resolutions": [1.0]}, {"resolutions": [0.5, 1.0]}),
    ("integration", {"neighbors": 15}, {"neighbors": 90}),
    ("gene_embedding", {"seeds": 1}, {"seeds": 2}),
    ("transfer", {"fit_on": ["atlas"]}, {"fit_on": ["atlas", "other"]}),
]


class LengthyConfig(TaskConfig):
    """Options of a task that a package adds."""

    implementation = f"{__name__}:Lengthy"
    name: Literal["lengthy"] = "lengthy"
    planned_s: float | None = None
    wrong: Literal["", "error", "list", "nan"] = ""  # instead of planned_s


class Lengthy:
    def __init__(self, config: LengthyConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        return TaskResult(figures={"cells": context.reader.n_obs})

    def estimate_s(self, sizes: DatasetSizes) -> Any:
        if self.config.wrong == "error":
            raise ValueError("as asked")
        wrong = {"list": [1.0], "nan": float("nan")}
        return wrong.get(self.config.wrong, self.config.planned_s)


@pytest.fixture
def lengthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengthy task, as of an installed package."""
    point = EntryPoint("lengthy", f"{__name__}:LengthyConfig", "cellmill.task")
    monkeypatch.setattr(
        plugin, "entry_points", lambda group: [point] if group == "cellmill.task" else []
    )


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of two gene sets and two edges, in the working directory."""
    (tmp_path / "sets.gmt").write_text(SETS)
    (tmp_path / "edges.tsv").write_text(EDGES)
    monkeypatch.chdir(tmp_path)


def estimate(name: str, sizes: DatasetSizes, **options: Any) -> float:
    config = TaskConfig.model_validate({"name": name} | NEEDED.get(name, {}) | options)
    seconds = config.load()(config).estimate_s(sizes)
    assert isinstance(seconds, float)
    return seconds


@pytest.mark.parametrize("name", BUILT_IN["task"])
def test_each_built_in_task_has_an_estimate(name: str, sets: None) -> None:
    seconds = estimate(name, WORK)
    assert isfinite(seconds)
    assert seconds >= 0
    if name != "throughput":
        assert seconds > 0


@pytest.mark.parametrize(
    ("name", "size"), [(task["name"], size) for size, tasks in LARGER.items() for task in tasks]
)
def test_an_estimate_grows_with_the_dataset(name: str, size: str, sets: None) -> None:
    larger = replace(WORK, **{size: 2 * getattr(WORK, size)})
    assert estimate(name, larger) > estimate(name, WORK)


@pytest.mark.parametrize(("name", "fewer", "more"), MORE)
def test_an_estimate_grows_with_repetitions(
    name: str, fewer: dict[str, Any], more: dict[str, Any], sets: None
) -> None:
    assert estimate(name, WORK, **more) > estimate(name, WORK, **fewer)


def test_cells_that_a_task_does_not_draw_cost_little() -> None:
    many = replace(WORK, n_cells=10_000)
    more = replace(WORK, n_cells=1_000_000)
    assert estimate("probe", many) == estimate("probe", more)


def test_a_role_with_one_value_makes_no_folds() -> None:
    one_donor = replace(WORK, n_values=WORK.n_values | {"donor": 1})
    assert one_donor.count_folds(["donor", "batch"], 10) == 3


@pytest.mark.parametrize("name", ["low_depth", "missing_genes"])
def test_a_ceiling_of_degraded_cells_costs_as_in_probe(name: str) -> None:
    few, many = (replace(WORK, n_cells=n) for n in (2_000, 10_000))
    ceiling_s = many.halves_s(10_000) - few.halves_s(2_000)
    assert estimate(name, many) - estimate(name, few) == pytest.approx(ceiling_s)


def test_training_cells_that_a_task_does_not_read_cost_nothing() -> None:
    ten_thousand, twenty_thousand, more = (
        replace(WORK, n_training=n) for n in (10_000, 20_000, 1_000_000)
    )
    assert estimate("probe", ten_thousand) == estimate("probe", more)
    assert estimate("imputation", ten_thousand) < estimate("imputation", twenty_thousand)
    assert estimate("imputation", twenty_thousand) == estimate("imputation", more)


def test_a_plan_knows_all_training_cells(context: Context) -> None:
    manifest: Any = SimpleNamespace(splits={"train": SimpleNamespace(n_obs=15_000)})
    model = replace(context.model, manifest=manifest)
    known = []

    class Recorder(Task):
        def estimate_s(self, sizes: DatasetSizes) -> float:
            known.append(sizes.n_training)
            return 0.0

    planned = replace(context, model=model)
    Planner(planned).estimate("probe", Recorder(None), planned)
    assert known == [15_000]


def test_transfer_plans_no_time_for_datasets_that_it_skips() -> None:
    assert estimate("transfer", WORK, fit_on=["screen"]) == 0
    assert estimate("transfer", WORK, test_on=["other"]) == 0


def test_the_plan_is_one_line() -> None:
    planned: dict[str, float | None] = {"probe": 43.2, "reconstruct": 0.3, "probe of donor": 200.0}
    assert describe_plan(planned, 1) == (
        "planned CPU time: probe about 43 s, reconstruct under 1 s, probe of donor about 3 min; "
        "in all about 4 min"
    )
    assert describe_plan({"probe": 43.2, "toy": None}, 2) == (
        "planned CPU time: probe about 43 s, toy not known; "
        "in all about 43 s without those not known, about 43 s on 2 free cores"
    )
    assert describe_plan({"toy": None}, 2) == "planned CPU time: toy not known"
    assert describe_plan({"a": 30.0, "b": 30.0, "c": 30.0}, 2) == (
        "planned CPU time: a about 30 s, b about 30 s, c about 30 s; "
        "in all about 90 s, about 45 s on 2 free cores"
    )


@pytest.mark.parametrize(
    ("options", "planned"),
    [
        ({}, "not known"),
        ({"wrong": "error"}, "not known"),
        ({"wrong": "list"}, "not known"),
        ({"wrong": "nan"}, "not known"),
        ({"planned_s": 0.0}, "under 1 s"),
        ({"planned_s": 1e9}, "about [0-9,.]+ days"),
    ],
)
def test_a_task_of_a_package_may_plan_its_seconds(
    corpus: dict[str, Path],
    tmp_path: Path,
    lengthy: None,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    planned: str,
) -> None:
    evaluate(corpus, tmp_path / "metrics.json", effort="fast", tasks={"lengthy": options})
    log = capsys.readouterr().out
    assert re.search(rf"^simulated: planned CPU time: lengthy {planned}(; in all .*)?$", log, re.M)
    took = r"Effort fast left out nothing; all numbers are in metrics\.json; took \d+ s \(0 CPU-s\)"
    assert re.search(rf"^simulated: lengthy: {took}$", log, re.M)


def test_a_wrong_plan_changes_no_result_and_no_key(
    corpus: dict[str, Path], tmp_path: Path, lengthy: None, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = {"lengthy": {"planned_s": 10.0}, "reconstruct": {}}
    out = tmp_path / "usual" / "metrics.json"
    usual = evaluate(corpus, out, effort="fast", tasks=tasks)
    keys = {path.name for path in (tmp_path / "usual" / "finished").glob("*.task.json")}
    for name, text in (("wrong", '{"lengthy": 4.0, "reconstruct": 0.25}'), ("damaged", "{")):
        finished = tmp_path / name / "finished"
        finished.mkdir(parents=True)
        (finished / "seconds.json").write_text(text)
        again = evaluate(corpus, tmp_path / name / "metrics.json", effort="fast", tasks=tasks)
        assert again == usual
        assert {path.name for path in finished.glob("*.task.json")} == keys
    capsys.readouterr()
    (tmp_path / "usual" / "finished" / "seconds.json").write_text('{"lengthy": 4.0}')
    assert evaluate(corpus, out, effort="fast", tasks=tasks) == usual
    log = capsys.readouterr().out
    assert log.count(": finished earlier") == 2
    assert "planned" not in log


def test_the_next_plan_learns_what_tasks_took(tmp_path: Path) -> None:
    ratios = LearnedRatios(tmp_path / "seconds.json")
    assert ratios.read() == {}
    ratios.learn("probe", 10.0, 15.0)
    ratios.learn("clustering", 10.0, 1_000.0)
    assert ratios.read() == {"probe": 1.5, "clustering": 4.0}
    # too short, or not planned
    ratios.learn("probe", 10.0, 0.9)
    ratios.learn("probe", 0.9, 10.0)
    ratios.learn("toy", None, 10.0)
    assert ratios.read() == {"probe": 1.5, "clustering": 4.0}


def test_tasks_that_read_no_stored_prediction_are_learned(
    corpus: dict[str, Path], tmp_path: Path, lengthy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_module, "LEAST_LEARNED_S", 0.0)
    files = corpus | {"baselines": tmp_path / "baselines"}
    tasks = {"probe": {"seeds": 1}, "lengthy": {"planned_s": 10.0}}
    learned = []
    for name in ("first", "second"):
        evaluate(files, tmp_path / name / "metrics.json", effort="fast", tasks=tasks)
        ratios = json.loads((tmp_path / name / "finished" / "seconds.json").read_text())
        learned.append({*ratios})
    assert learned == [{"probe", "lengthy"}, {"lengthy"}]


@pytest.mark.parametrize("text", ["", "[]", '{"probe": "long"}', '{"probe": null}'])
def test_damaged_seconds_teach_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "seconds.json"
    path.write_text(text)
    ratios = LearnedRatios(path)
    assert ratios.read() == {}
    ratios.learn("probe", 10.0, 20.0)
    assert json.loads(path.read_text()) == {"probe": 2.0}


def test_a_skipped_task_plans_no_time(context: Context) -> None:
    config = TaskConfig.model_validate({"name": "probe"})
    planner = Planner(context)
    tasks = {"probe": config}
    options = context.options.model_copy(update={"tasks": tasks})
    task = config.load()(config)
    unlabelled = replace(context, options=options, roles={})
    assert planner.estimate("probe", task, unlabelled) == 0
    seconds = planner.estimate("probe", task, replace(context, options=options))
    assert seconds is not None
    assert seconds > 0
