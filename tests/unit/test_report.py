"""The report shows what the folders hold, escapes user text, and loads nothing."""

import base64
import csv
import hashlib
import json
import re
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vl_convert
from reported import (
    CLOSED,
    EVIL,
    LOSS,
    LOST,
    make_corpus,
    make_dataset,
    make_method,
    make_row,
    make_run,
    write,
)

from cellmill.config.options import ReportOptions
from cellmill.errors import DataError
from cellmill.evaluate.run import describe_result
from cellmill.evaluate.scores import ScoreColumn, tabulate
from cellmill.files import user_cache
from cellmill.report.checkpoints import make_checkpoint_charts
from cellmill.report.collect import ReportedRun, UmapCells, read_corpus, read_run
from cellmill.report.drawing import page_charts
from cellmill.report.drawing.cell_counts import make_confusion_chart, make_histogram_chart
from cellmill.report.drawing.curves import StepValues, make_curves_chart, make_loss_chart
from cellmill.report.drawing.page_charts import PageCharts
from cellmill.report.drawing.png import shrink_png
from cellmill.report.drawing.umap import find_max_cells, list_categories, make_umap_chart
from cellmill.report.overview import summarise_behind
from cellmill.report.page import load_scripts, render
from cellmill.report.schemas import CostSchema, LoggedLineSchema, PlanSchema, RunRecordSchema
from cellmill.report.side_by_side import compare_runs
from cellmill.report.standings import Standing, list_standings
from cellmill.report.text import to_text
from cellmill.report.training import (
    compare_with_plan,
    describe_cost,
    list_step_values,
    make_loss_charts,
)
from cellmill.runs import results
from cellmill.runs.cost import Start
from cellmill.runs.results import (
    Difference,
    Evaluation,
    Outcome,
    Row,
    Score,
    ScoredMethod,
    TaskResult,
    Verdict,
    compare,
)
from cellmill.stages import report

OPTIONS = ReportOptions.model_validate({"report": {}})
TOTALS = (
    "gpu_hours",
    "cpu_core_hours",
    "elapsed_s",
    "queue_wait_s",
    "training_efficiency_frac",
    "cpu_efficiency_frac",
)


@contextmanager
def changed_metrics(run: Path) -> Iterator[dict[str, Any]]:
    """The datasets of a run's metrics.json, which is written again with the changes of the block."""
    path = run / "evaluate/metrics.json"
    metrics = json.loads(path.read_text())
    yield metrics["datasets"]
    write(path, metrics)


@pytest.fixture
def page(tmp_path: Path) -> str:
    out = tmp_path / "report" / "index.html"
    runs = [make_run(tmp_path / "runs" / "first"), make_run(tmp_path / "runs" / EVIL)]
    options = ReportOptions.model_validate({"report": {"title": f"Cells {EVIL}"}})
    report.report(
        options=options, runs=runs, corpora=[make_corpus(tmp_path / "corpora" / "pbmc")], out=out
    )
    return out.read_text(encoding="utf-8")


def without_scripts(page: str) -> str:
    """The page without its own two scripts, each of which must be there once."""
    for script in load_scripts():
        assert page.count(script) == 1
        page = page.replace(script, "")
    return re.sub(r'data:image/png;base64,[^"]*', "data:", page)


def unpack(data: str) -> dict[str, Any]:
    """What the page's script unpacks: charts, and deferred details."""
    return json.loads(zlib.decompress(base64.b64decode(data, validate=True)))


def text_of(page: str) -> str:
    page = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def rendered(*runs: Path) -> str:
    return render("r", [*map(read_run, runs)], [])


def test_the_bundle_of_scripts_is_kept_for_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = load_scripts()[0]
    read = load_scripts.__wrapped__
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read()[0] == bundle
    [kept] = (tmp_path / "cellmill").iterdir()
    assert kept.read_text() == bundle
    kept.write_text("kept")
    assert read()[0] == "kept"
    kept.write_bytes(b"\xff")  # damaged: it is made anew
    assert read()[0] == kept.read_text() == bundle
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))  # no folder: it is made anew and not kept
    assert read()[0] == bundle
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", raise_runtime_error)
    assert read()[0] == bundle
    with pytest.raises(
        DataError, match=r"^this user has no home folder; set HOME or XDG_CACHE_HOME$"
    ):
        user_cache()


def raise_runtime_error() -> Path:
    """As `Path.home` does for a user id without a home."""
    raise RuntimeError("Could not determine home directory.")


def test_the_page_loads_nothing_from_elsewhere(page: str) -> None:
    own = without_scripts(page)
    scripts = load_scripts()
    # base64 of pictures and of packed data may contain // by chance
    without_base64 = re.sub(r'(base64,|id="payload">)[\w+/=]*', "", own)
    assert not re.search(r"https?:|//[a-z]|<(link|iframe|object|embed)\b", without_base64)
    digests = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts
    ]
    policy = f"default-src 'none'; script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}';"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}' in unescape(own)
    targets = re.findall(r'\b(?:src|href)="([^"]*)"', own)
    assert len(targets) > 8
    assert all(target.startswith(("#", "data:")) for target in targets)


def test_user_text_is_escaped(page: str) -> None:
    own = without_scripts(page)
    assert re.findall(r"<script[^>]*>", own) == [
        '<script type="application/zlib" id="payload">',
        "<script>",
        "<script>",
    ]
    assert "<b>few" not in own
    assert own.count("&lt;script&gt;alert(1)") > 5
    [inside] = re.findall(r'id="payload">(.*?)</script>', own, re.DOTALL)
    assert EVIL in unpack(inside)["charts"][0]["columns"]["name"]


def test_details_of_many_runs_are_deferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / name) for name in ("first", EVIL)]
    plain = without_scripts(rendered(*runs))
    monkeypatch.setattr(page_charts, "MAX_RUNS_OF_SMALL_PAGE", 1)
    large = without_scripts(rendered(*runs))
    pattern = r'(id="payload">)(.*?)(</script>)'
    [deferred] = [unpack(found[1])["deferred"] for found in re.findall(pattern, large)]
    assert len(deferred) > 10
    assert unpack(re.findall(pattern, plain)[0][1])["deferred"] == []
    place = r'<p class="dim" data-deferred="(\d+)">Allow scripts to see the details.</p>'
    whole = re.sub(place, lambda match: deferred[int(match[1])], large)
    assert re.sub(pattern, "", whole) == re.sub(pattern, "", plain)
    assert len(large) < len(plain)


def test_the_page_shows_what_the_folders_hold(page: str) -> None:
    text = text_of(page)
    for wanted in (
        "1,234,567", "6,368", "0.4321", "0.840", "0.800", LOSS, "Where models are behind",
        "B $x_$", "<b>few 3",
        "0.840 ± 0.020", "probe: accuracy", "n unlabelled 2", "Skipped: the dataset has no label column.", "-0.012",
        "97.3 %, 80.0 % of these with an ortholog in human", "min_genes: 5",
        "a vocabulary of 1 gene", "240", "f00d" * 16, "cafe" * 16, "beef" * 16, "2.99.1", "train.lr", "raw.h5ad",
        f"embedding + LR; difference from the best baseline -0.040, 95 % interval -0.070 to -0.010; {CLOSED}.",
        f"embedding + LR {CLOSED}.", "0 % is the first method named and 100 % the second",
        "3 cells, 1 of them held out", "UMAP by batch", "confusion of embedding + kNN",
        "Tested cells of all folds and repetitions",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert not re.search("accuracy folds|not converged", text), (
        "lists, and counts that are 0 in all rows"
    )


def test_no_heading_skips_a_level(page: str) -> None:
    levels = [int(level) for level in re.findall(r"<h([1-6])>", without_scripts(page))]
    assert all(below <= above + 1 for above, below in pairwise(levels))
    evaluation = page[page.index('id="evaluation"') : page.index('id="cost"')]
    datasets = re.findall(r"<h4>(.*?)</h4>", evaluation)
    assert datasets == 2 * ["pbmc", "bare"]


def test_a_stacked_cell_is_labelled_with_its_heading(page: str) -> None:
    tables = re.findall(r'<table class="sortable stack">(.*?)</table>', page, re.DOTALL)
    assert len(tables) > 2
    for table in tables:
        [head, *rows] = table.split("<tr>")[1:]
        headings = re.findall(r'<th scope="col".*?>(.*?)</th>', head)[1:]
        for row in rows:
            assert re.findall('data-label="(.*?)"', row) == headings


def test_each_comparison_is_a_bar_on_the_scale_of_its_task(
    page: str,
) -> None:
    shown = page[page.index('id="evaluation"') :]
    rows = re.findall(r'<tr class="([^"]*)">\s*<th scope="row">([^<]+?) ?<', shown)
    assert rows[:5] == [
        ("own", "embedding"), ("", "all genes"), ("own", "embedding + logistic regression"),
        ("own", "embedding + kNN"), (" best", "all genes + logistic regression"),
    ]  # fmt: skip
    assert re.findall(r'<td class="n([^"]*)">([^<]*)</td>', shown)[:4] == [
        (" underlined", "0.800"), ("", "0.750"), (" underlined best", "0.840"), ("", "–")
    ]  # fmt: skip
    # -0.09 (-0.12 to -0.06) of a half width of 0.12
    bar = shown[shown.index('<table class="bars">') :]
    assert '<path d="M5.0 7H52.5"/>\n<circle cx="28.8" cy="7"' in bar
    assert '<td class="behind">' in bar


def test_the_same_folders_give_the_same_bytes(tmp_path: Path, page: str) -> None:
    runs = [read_run(tmp_path / "runs" / "first"), read_run(tmp_path / "runs" / EVIL)]
    assert render(f"Cells {EVIL}", runs, [read_corpus(tmp_path / "corpora" / "pbmc")]) == page


@pytest.mark.parametrize(
    ("value", "text"),
    [(9999.4, "9,999"), (9999.5, "10,000"), (-9999.7, "-10,000"), (12345.6, "12,346")],
)
def test_rounding_to_five_digits_gives_no_exponent(value: float, text: str) -> None:
    assert to_text(value) == text


def test_nouns_agree_with_their_numbers(page: str) -> None:
    nouns = "runs|cells|genes|datasets|corpora|labels|tasks|copies"
    assert not re.search(rf"\b1 ({nouns})\b", without_scripts(page))
    assert "2 runs, 1 corpus." in text_of(page)
    skipped = TaskResult(skipped="no label")
    one, none = of_tasks("a", probe=skipped), of_tasks("b")
    text = text_of(render("r", [one, none], []))
    assert "a on d: nothing was scored, because every task was skipped (probe: no label)." in text
    assert "b on d: nothing was scored, because no task is configured." in text
    before = [1000, 1]
    figure = make_histogram_chart("genes", range(3), before, before, "genes per cell")
    assert figure.spec["encoding"]["x"]["title"] == "genes per cell (1 cell beyond)"


def test_missing_files_are_listed_on_the_page(tmp_path: Path) -> None:
    text = text_of(render("r", [read_run(tmp_path)], [read_corpus(tmp_path)]))
    for wanted in (
        "not trained",
        "not evaluated",
        "train/metrics.jsonl has no values to draw",
        "not sharded",
        "No QC reports",
    ):
        assert wanted in text, wanted


def test_runs_without_a_result_are_in_the_first_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for number in range(40):
        run = tmp_path / f"run-{number:02}"
        write(run / "plan.json", {"parameters": 1})
        if number not in (7, 8, 31):
            results.write(run / "evaluate" / "metrics.json", Evaluation({"pbmc": make_dataset()}))
        runs.append(run)  # an evaluation without tasks is named after these
    out = tmp_path / "report" / "index.html"
    report.report(options=OPTIONS, runs=runs, corpora=[], out=out)
    sentence = "3 of 40 runs have no result: run-07, run-08, run-31."
    assert capsys.readouterr().out.splitlines()[0] == sentence
    overview = text_of(out.read_text(encoding="utf-8")).partition(" Overview ")[2]
    assert overview.startswith(sentence)
    one = text_of(rendered(runs[6], runs[7])).partition(" Overview ")[2]
    assert one.startswith("1 of 2 runs has no result: run-07.")
    assert "no result" not in text_of(rendered(runs[6]))


def test_further_tables_of_a_task_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    curves = [{"compound": EVIL, "EC50": 0.25, "n": None}, {"compound": "b", "EC50": 2.0, "n": 1.5}]
    with changed_metrics(run) as datasets:
        tasks = next(iter(datasets.values()))["tasks"]
        next(iter(tasks.values()))["tables"] = {"dose curves": curves, "none": []}
    page = rendered(run)
    assert f"dose curves compound EC50 n {EVIL} 0.25 – b 2 1.5" in text_of(page)
    assert EVIL not in without_scripts(page)


def test_tables_of_bridges_are_next_to_ours(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    evaluation = read_run(run).evaluation
    assert evaluation is not None
    dataset = next(iter(evaluation.datasets))
    rows = [
        ("embedding", "model", 0.25),
        ("mean", "baseline", 0.5),
        ("probe: mean x 2", "probe", None),
    ]
    tidy = [
        {"name": name, "kind": kind, "metric": "pds_cosine", "value": value}
        for name, kind, value in rows
    ]
    bridge = {"package": "cell-eval2", "version": "0.20.0", "dataset": dataset, "rows": tidy}
    path = run / "bridges" / f"{dataset}.cell-eval2.json"
    write(path, bridge)
    text = text_of(rendered(run))
    assert (
        "cell-eval2 0.20.0 method pds cosine embedding model 0.25 mean 0.5 probe: mean x 2 probe –"
        in text
    )
    assert "Probe: predictions of another method, at half or double size" in text
    digest = json.loads((run / "evaluate/metrics.json").read_text())["model"]["digest"]
    write(path, bridge | {"model_digest": digest})
    assert text_of(rendered(run)) == text
    write(path, bridge | {"model_digest": "of another"})
    text = text_of(rendered(run))
    assert f"Skipped: {path.name} is of another model; make it again." in text
    assert "pds cosine" not in text


def test_missing_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone: expected the folder of a run, found none$"):
        read_run(tmp_path / "gone")
    with pytest.raises(
        DataError, match=r"^two runs are called 'run'; rename one of their folders$"
    ):
        rendered(*[make_run(tmp_path / "run")] * 2)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("plan.json", {"memory": 3}),
        ("train/cost.json", {"totals": None}),
        (
            "evaluate/metrics.json",
            {"format": 2, "datasets": {"a": {"tasks": {"probe": {"verdicts": [], "rows": 3}}}}},
        ),
        ("evaluate/metrics.json", [1]),
        ("evaluate/metrics.json", {"datasets": {}}),
        ("evaluate/umap.tsv", "dataset\tobs_name\tlabel\tx\ty\theldout\na\tb\tc\tnan\t1\t1\n"),
        ("evaluate/umap.tsv", b"\xff\x00"),
    ],
)
def test_a_file_with_wrong_content_is_named_in_one_line(
    tmp_path: Path, file: str, content: Any
) -> None:
    folder = make_run(tmp_path / "run")
    out = tmp_path / "index.html"
    if isinstance(content, bytes):
        (folder / file).write_bytes(content)
    else:
        write(folder / file, content)
    with pytest.raises(DataError, match=rf"^{folder / file}\W[^\n]*again$"):
        report.report(options=OPTIONS, runs=[folder], corpora=[], out=out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("outcome", "box"),
    [("behind", '<div class="comparisons warning">\n<h3>Where models are behind<'),
     ("level", '<div class="comparisons">\n<h3>Where models are behind: in no comparison<'),
     ("ahead", None)],
)  # fmt: skip
def test_comparisons_warn_only_if_a_model_is_behind(
    tmp_path: Path, outcome: Outcome, box: str | None
) -> None:
    run = make_run(tmp_path / "first")
    with changed_metrics(run) as datasets:
        verdict = replace(LOST, outcome=outcome)
        datasets["pbmc"]["tasks"]["probe"]["verdicts"] = [asdict(verdict)]
    page = rendered(run)
    assert (box or "<main>") in page
    assert (f"<li>pbmc: {verdict.sentence}</li>" in page, "Where models are behind" in page) == (
        box is not None,
    ) * 2


def test_no_warning_without_a_loss_to_a_best_baseline() -> None:
    best = verdict_on(OWN, GENES, "f", 0.0, (-0.1, 0.1))
    weak = Row(make_method("embedding", "kNN"), {"f": Score(0.3)})
    other = Row(make_method("PCA50", "kNN"), {"f": Score(0.4)})
    loss = verdict_on(weak.method, other.method, "f", -0.1, (-0.2, -0.05))
    rows = [Row(OWN, {"f": Score(0.5)}), Row(GENES, {"f": Score(0.5)}), weak, other]
    page = render("r", [of_tasks("a", probe=TaskResult(rows, "f", [best, loss]))], [])
    title = "Where models are behind: in no comparison with a best baseline<"
    assert f'<div class="comparisons">\n<h3>{title}' in page
    assert loss.sentence in page


def test_many_losses_of_a_run_fold_into_one_line() -> None:
    verdicts = [verdict_on(OWN, GENES, f"f{i}", -0.1 - i / 100, (-0.4, -0.04)) for i in range(20)]
    columns = {f"f{i}": Score(0.5) for i in range(20)}
    result = TaskResult([Row(OWN, columns), Row(GENES, columns)], "f0", verdicts)
    shown = without_scripts(render("r", [of_tasks("a", probe=result)], []))
    box = shown[shown.index("Where models are behind") :]
    before_words = box[: box.index("<details>")]
    assert re.findall("<li>(.*?)</li>", before_words) == [
        "d: behind in 20 of 20 comparisons (probe: f19 -0.290 and 19 more)."
    ]
    assert (
        "Of 20 comparisons with the best baseline of a metric: ahead in none, behind in 20" in shown
    )


def test_verdicts_behind_of_a_task_without_a_metric_are_listed() -> None:
    verdict = verdict_on(OWN, GENES, "mixing", -0.1, (-0.2, -0.05))
    rows = [Row(method, {"mixing": Score(0.5)}) for method in (OWN, GENES)]
    run = of_tasks("a", integration=TaskResult(rows, None, [verdict]))
    text = text_of(render("r", [run], []))
    assert "Next: take the best baseline, which costs less: of 1 comparison with it" in text
    assert (
        "Where models are behind d: behind in 1 of 1 comparison (integration: mixing -0.100)."
        in text
    )


def test_a_wait_in_the_queue_is_not_counted_as_a_start() -> None:
    unknown = dict.fromkeys(("nodes", "processes", "gpus", "cpus"))
    waited = Start("7", "p", "CANCELLED", 0.0, None, 9.0, 9.0, 0.0, **unknown)
    ran = replace(waited, started_at=1.0, elapsed_s=8.0)
    lost = replace(waited, state="FAILED", queue_wait_s=None, elapsed_s=None)
    cost = CostSchema(source="own files", jobs=[waited, ran, lost], totals={}, unknown={})
    run = ReportedRun("a", None, None, None, None, None, cost=cost)
    assert '<th scope="row">a</th>\n<td class="n">2</td>' in render("r", [run], [])


def test_a_gap_without_a_scale_is_in_the_first_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    words = "no scale: all (0.410) is not clearly better than majority (0.400)"
    with changed_metrics(run) as datasets:
        datasets["pbmc"]["tasks"]["probe"]["gaps"] = [
            {"column": "accuracy", "zero": ["majority", 0.4], "ceiling": ["all", 0.41]}
        ]
    text = text_of(rendered(run))
    assert f"probe: accuracy N{words[1:]}." in text
    assert f"95 % interval -0.070 to -0.010; {words}." in text
    assert "0 % is the first" not in text


def test_a_single_repetition_is_shown_without_a_deviation() -> None:
    columns = [ScoreColumn("f", "f", {OWN: np.full((1, 9), 0.25), GENES: np.full((1, 9), 0.5)})]
    page = text_of(render("r", [of_tasks("a", probe=tabulate(columns, {}))], []))
    assert "embedding + kNN model 0.250 all genes" in page
    assert "±" not in page.partition("± is the standard deviation")[0]


def test_wide_tables_mark_the_best_baseline() -> None:
    accuracies = {
        make_method("embedding", "kNN"): 0.9,
        make_method("embedding", "logistic regression"): 0.8,
        make_method("PCA", "kNN"): 0.7,
        make_method("genes", "kNN"): 0.6,
    }
    columns = ["whole", "half, matched", "half, shifted"]
    rows = []
    for method, value in accuracies.items():
        scores = {column: Score(value, 0.0123) for column in columns}
        rows.append(Row(method, scores | {"tenth": Score(-value, 0.0123)}))
    result = TaskResult(rows, "half, shifted", notes=["own is level."])
    evaluation = Evaluation({"d": make_dataset(toy=result)})
    run = ReportedRun("run", None, None, None, None, evaluation)
    page = render("r", [run], [])
    whole = page[page.index("<details>") :]
    assert re.findall(r'<td class="n underlined">([^<]*) <', whole) == ["0.700"] * 3 + ["-0.600"]
    [across] = compare_runs([run])
    assert across.rows == [(run, "d", {"embedding": 0.9, "PCA": 0.7, "genes": 0.6})]
    assert "own is level." in page


def test_values_of_different_metrics_are_in_different_tables() -> None:
    runs = []
    for name, metric in (("a", "half, shifted"), ("b", "tenth, shifted"), ("c", "half, shifted")):
        depth = TaskResult([make_row("embedding", "kNN", **{metric: 0.5})], metric)
        runs.append(
            of_tasks(name, low_depth=depth, probe=TaskResult([make_row("embedding", f=0.5)], "f"))
        )
    tables = compare_runs(runs)
    assert [
        (table.task, table.metric, [row.run.name for row in table.rows]) for table in tables
    ] == [
        ("low_depth", "half, shifted", ["a", "c"]),
        ("low_depth", "tenth, shifted", ["b"]),
        ("probe", "f", ["a", "b", "c"]),
    ]


def test_a_model_of_unknown_training_cells_is_tagged(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    assert run.evaluation is not None
    tag = "unknown: may have seen these cells"
    assert tag not in render("r", [run], [])
    evaluation = replace(run.evaluation, model={"unknown_cells": ["geneformer"]})
    assert tag in render("r", [replace(run, evaluation=evaluation)], [])


@pytest.mark.parametrize(
    ("changes", "seen", "scored"),
    [
        (
            {"cells": "heldout", "n_cells": 300},
            "210",
            "90 of 300 cells, held out from training and validation.",
        ),
        ({"cells": "all"}, "scored too", "90 of 90 cells, training cells included."),
        (
            {"cells": "all", "in_corpus": False},
            "0",
            "90 of 90 cells, of a dataset in no training or validation split.",
        ),
        (
            {"cells": "all", "in_corpus": False, "n_copies": 30},
            "scored too",
            "90 of 90 cells, copies of training cells included.",
        ),
    ],
)
def test_scored_training_cells_are_said_to_be_scored(
    changes: dict[str, Any], seen: str, scored: str
) -> None:
    result = of_task("f", {OWN: 0.9, GENES: 0.7}, [])
    dataset = replace(make_dataset(probe=result), **changes)
    run = ReportedRun("a", None, None, None, None, Evaluation({"d": dataset}))
    page = render("r", [run], [])
    [found] = re.findall(r'data-label="seen in training" data-value="(.*?)">(.*?)</td>', page)
    assert found == (seen, seen)
    assert f"Scored: {scored}" in text_of(page)


def test_one_evaluated_step_with_a_baseline_has_no_chart() -> None:
    rows = [make_row("embedding", "kNN", f=0.5), make_row("PCA", "kNN", f=0.4)]
    scored = Evaluation({"d": make_dataset(probe=TaskResult(rows, "f"))}, {"step": 20})
    unscored = Evaluation({"d": make_dataset(probe=TaskResult(skipped="no label"))}, {"step": 10})
    run = ReportedRun("run", None, None, None, None, scored)
    assert [*make_checkpoint_charts(replace(run, evaluation_by_step={10: unscored}), "d")] == []
    [(_, chart)] = make_checkpoint_charts(replace(run, evaluation_by_step={10: scored}), "d")
    assert [(row["name"], row["step"]) for row in chart.rows] == [
        ("embedding + kNN", 10),
        ("embedding + kNN", 20),
        ("PCA + kNN (best baseline)", 10),
        ("PCA + kNN (best baseline)", 20),
    ]


def test_the_baseline_with_the_lowest_error_is_underlined() -> None:
    draws = np.random.Generator(np.random.Philox(key=2)).normal(0, 0.01, (2, 30))
    columns = []
    for heading, means in {"Pearson": (0.6, 0.5, 0.2), "MAE": (0.3, 0.1, 0.4)}.items():
        scores = dict(zip((OWN, GENES, UNSCALED), [mean + draws for mean in means]))
        columns.append(ScoreColumn(heading, heading, scores, lower_is_better=heading == "MAE"))
    run = of_tasks("run", perturbation=tabulate(columns, {}))
    page = render("r", [run], [])
    table = page[page.index('id="evaluation"') :]
    shown = re.findall(r'<td class="n underlined">([^<]*) <', table)
    assert shown == [f"{0.5 + draws.mean():.3f}", f"{0.1 + draws.mean():.3f}"]


def test_a_chart_uses_the_colours_of_the_page(tmp_path: Path) -> None:
    lines = [
        LoggedLineSchema(step=1, loss=2.0),
        LoggedLineSchema(step=2, loss=float("nan")),
        LoggedLineSchema(step=2, val_loss=1),
    ]
    series = {
        EVIL: {
            "training": list_step_values(lines, "loss"),
            "validation": list_step_values(lines, "val_loss"),
        }
    }
    drawn = PageCharts()
    shown = drawn.add(make_loss_chart("Loss, =1+1", series))
    assert shown.startswith("<figure")
    assert shown.count("<svg") == 1
    assert "currentColor" in shown
    assert "http" not in shown
    drawn.save(tmp_path)
    assert (tmp_path / "001_Loss_1_1.svg").exists()
    rows = [*csv.DictReader((tmp_path / "001_Loss_1_1.csv").open())]
    assert [(row["name"], row["series"], row["value"]) for row in rows] == [
        (EVIL, "training", "2.0"), (EVIL, "validation", "1.0")
    ]  # fmt: skip
    [chart] = unpack(drawn.payload)["charts"]
    assert chart["columns"] == {
        "name": [EVIL, EVIL],
        "series": ["training", "validation"],
        "step": [1, 2],
        "value": [2.0, 1.0],
    }


def umap_of(labels: Sequence[str], batches: Sequence[str]) -> UmapCells:
    """Held-out cells, all at the same coordinates."""
    x = array("d", [1.23456] * len(labels))
    texts = {"label": labels, "batch": batches}
    return UmapCells(x, array("d", [2.0] * len(labels)), bytes([1] * len(labels)), texts)


def test_a_umap_shows_at_most_4000_cells() -> None:
    figure = make_umap_chart("UMAP", umap_of(["B"] * 5000, [""] * 5000), ["B"])
    assert len(figure.rows) == 4000
    assert figure.rows[0] == {"x": 1.23, "y": 2.0, "label": 0, "held_out": 1}
    cells = umap_of([""] * 5, [*"baab", ""])
    assert list_categories(cells, "batch") == ["a", "b"]
    assert len(make_umap_chart("UMAP", cells, ["a", "b"], "batch", 2).rows) == 2
    drawn = make_umap_chart("UMAP", cells, ["a", "b"], "batch").rows
    assert sorted(row["batch"] for row in drawn) == [-1, 0, 0, 1, 1]
    many = umap_of(["B"] * 5000, ["a", "b"] * 2500)
    run = replace(of_tasks("run"), umap_by_dataset={"d": many})
    text = text_of(render("r", [run], []))
    n_drawn = re.findall(
        r"UMAP of 5,000 cells, 5,000 of them held out \(circles\); (\S+) of the 5,000 are drawn",
        text,
    )
    assert n_drawn == ["4,000", "1,500"]


def test_a_batch_called_no_batch_has_a_colour_of_its_own() -> None:
    cells = umap_of([""] * 3, ["no batch", "b", ""])
    spec = make_umap_chart("UMAP", cells, list_categories(cells, "batch"), "batch").spec
    names = ["b", "no batch", "(no batch)"]
    assert spec["encoding"]["color"]["scale"]["domain"] == names
    assert spec["transform"][0]["from"]["data"]["values"] == [
        {"code": code, "name": name} for code, name in zip((0, 1, -1), names)
    ]


def test_a_legend_has_no_label_only_if_a_cell_lacks_one() -> None:
    for labels, names in ((["a", "b"], ["a", "b"]), (["a", ""], ["a", "no label"])):
        cells = umap_of(labels, ["", ""])
        spec = make_umap_chart("UMAP", cells, list_categories(cells, "label"), "label").spec
        encoding = spec["encoding"]["color"]
        assert encoding["legend"].get("values", encoding["scale"]["domain"]) == names


def test_the_csv_of_a_umap_has_labels_instead_of_codes(tmp_path: Path) -> None:
    charts = PageCharts()
    charts.add(make_umap_chart("UMAP", umap_of(["b", "", "a", "b"], [""] * 4), ["b", "a"]))
    charts.save(tmp_path)
    rows = [*csv.DictReader((tmp_path / "001_UMAP.csv").open())]
    assert [*rows[0]] == ["x", "y", "label", "held_out"]
    assert sorted(row["label"] for row in rows) == ["", "a", "b", "b"]


def test_texts_that_a_spreadsheet_would_evaluate_are_quoted(tmp_path: Path) -> None:
    charts = PageCharts()
    formulas = [f"{start}1+1" for start in page_charts.FORMULA_STARTS]
    labels = [*formulas, "1-1"]
    charts.add(make_umap_chart("UMAP", umap_of(labels, [""] * len(labels)), labels))
    charts.add(make_curves_chart("Curve", {"-1": [(1, -2.0)]}, "loss"))
    charts.save(tmp_path)
    cells = csv.DictReader((tmp_path / "001_UMAP.csv").open(newline=""))
    assert {row["label"] for row in cells} == {*(f"'{text}" for text in formulas), "1-1"}
    [point] = csv.DictReader((tmp_path / "002_Curve.csv").open())
    assert point == {"name": "'-1", "step": "1", "value": "-2.0"}
    match = re.search(r"/\^\[(\S+)\]/\.test\(value\)", load_scripts().page)
    assert match is not None
    starts = match[1].replace(r"\t", "\t").replace(r"\r", "\r")
    assert sorted(starts) == sorted(page_charts.FORMULA_STARTS)


def test_many_runs_are_drawn_with_fewer_points() -> None:
    assert [*map(find_max_cells, (0, 1, 25, 100, 400))] == [4000, 4000, 2400, 600, 500]
    points = [(step, 1.0) for step in range(1000)]
    for n_runs, shown in ((1, 334), (100, 92), (400, 49)):
        runs = {str(number): points for number in range(n_runs)}
        rows = make_curves_chart("Loss", runs, "loss").rows
        assert len(rows) == n_runs * shown
        assert rows[-1]["step"] == 999


def test_curves_without_points_take_no_points_from_others() -> None:
    points: StepValues = [(step, 1.0) for step in range(1000)]
    alone = make_curves_chart("Loss", {"a": points}, "loss")
    empty: dict[str, StepValues] = {str(number): [] for number in range(400)}
    assert make_curves_chart("Loss", {"a": points} | empty, "loss").rows == alone.rows
    losses = {"training": points, "validation": points}
    both = make_loss_chart("Loss", {"a": losses})
    assert make_loss_chart("Loss", {"a": losses} | {key: {} for key in empty}).rows == both.rows
    assert make_curves_chart("Loss", empty, "loss").rows == []


@pytest.mark.parametrize("n_points", [1, 2, 399, 400, 401, 799, 800, 801])
def test_a_curve_has_at_most_400_points(n_points: int) -> None:
    points = [(float(step), 1.0) for step in range(n_points)]
    rows = make_curves_chart("Loss", {"a": points}, "loss").rows
    assert min(n_points, 200) <= len(rows) <= 400
    assert (rows[0]["step"], rows[-1]["step"]) == (0, n_points - 1)


def test_a_histogram_leaves_out_the_tails() -> None:
    before = [1, 0, 500, 499, 0, 0, 1]
    figure = make_histogram_chart("genes", range(8), before, before, "genes per cell")
    assert [(row["from"], row["before"]) for row in figure.rows] == [(2, 500), (3, 499)]
    assert figure.spec["encoding"]["x"]["title"] == "genes per cell (2 cells beyond)"
    assert len(make_histogram_chart("genes", range(4), [5, 0, 5], [0, 0, 5], "genes").rows) == 3


def test_confusion_is_shown_as_shares_of_the_true_class() -> None:
    figure = make_confusion_chart("Confusion", ["A", EVIL], [[3, 1], [0, 5]])
    assert figure.rows == [
        {"true": "A", "predicted": "A", "cells": 3, "share": 0.75},
        {"true": "A", "predicted": EVIL, "cells": 1, "share": 0.25},
        {"true": EVIL, "predicted": EVIL, "cells": 5, "share": 1.0},
    ]


def of_task(
    metric: str,
    rows: dict[ScoredMethod, float],
    verdicts: list[Verdict],
    lines: Sequence[tuple[Any, ...]] = (),
) -> TaskResult:
    """Result of a task; `lines` are the differences, without their standard error over cells."""
    return TaskResult(
        [Row(method, {metric: Score(value)}) for method, value in rows.items()],
        metric,
        verdicts,
        differences=[Difference(*line, 0.0) for line in lines],
    )


def of_tasks(name: str, **tasks: TaskResult) -> ReportedRun:
    evaluation = Evaluation({"d": make_dataset(**tasks)})
    return ReportedRun(name, None, None, None, None, evaluation)


def verdict_on(own: ScoredMethod, other: ScoredMethod, *numbers: Any) -> Verdict:
    return compare(own.name, other.name, *numbers)


OWN = make_method("embedding", "kNN")
GENES = make_method("all genes", "LR")
UNSCALED = make_method("all genes", "LR, unscaled")
UNTRAINED = make_method("untrained", "kNN")


def count_outcomes(standing: Standing) -> tuple[int, int, int]:
    return (
        standing.count_verdicts("ahead"),
        standing.count_verdicts("level"),
        standing.count_verdicts("behind"),
    )


def test_the_standing_names_the_best_run() -> None:
    def run(name: str, value: float, low: float, high: float) -> ReportedRun:
        found = [
            verdict_on(OWN, UNSCALED, "f", value - 0.8, (low, high)),
            verdict_on(OWN, GENES, "f", value - 0.7, (low + 0.1, high + 0.1)),
        ]
        result = of_task("f", {OWN: value, GENES: 0.7, UNSCALED: 0.8}, found)
        # the same comparison, made twice, counts once
        return of_tasks(name, probe=result, low_depth=result)

    runs = [run("a", 0.7, -0.2, -0.01), run("b", 0.9, 0.02, 0.2), run("c", 0.81, -0.1, 0.12)]
    found = list_standings(runs)
    assert [one.is_leader_or_tied for one in found] == [False, True, False]
    assert not any(one.is_called_best for one in found), (
        "no repetitions, so no interval between runs"
    )
    assert [one.verdict and one.verdict.outcome for one in found] == [
        "behind",
        "ahead",
        "level",
    ]
    assert count_outcomes(found[0]) == (0, 0, 1)
    assert found[0].baseline == Row(UNSCALED, {"f": Score(0.8)})
    assert (
        "b has the highest mean on d over the tasks that all have (probe, low depth), not shown to be beyond chance: "
        "ahead of the best baseline, all genes + LR, unscaled: 0.900 against 0.800 (probe f). Of 1 comparison with "
        "the best baseline of a metric: ahead in 1 (probe: f +0.100), behind in none."
    ) in text_of(render("r", runs, []))
    # the digits that are shown are the same
    runs = [run("a", 0.8101, -0.1, 0.1), run("b", 0.81, -0.1, 0.1), run("c", 0.8094, -0.1, 0.1)]
    assert [one.is_leader_or_tied for one in list_standings(runs)] == [True, True, False]


def test_a_classifier_that_features_lack_is_a_dash() -> None:
    result = of_task("f", {OWN: 0.9, GENES: 0.7, UNSCALED: 0.8}, [])
    page = render("r", [of_tasks("a", probe=result)], [])
    grid = page.partition("features by classifier")[2].partition("</table>")[0]
    cells = re.findall(r'<td class="n[^"]*">(.*?)</td>', grid)
    assert sorted(cells) == ["0.700", "0.800", "0.900", "–", "–", "–"]


def test_features_without_a_classifier_are_named_below() -> None:
    bare = make_method("majority")
    said = "Without a classifier, so in the first column: majority."
    result = of_task("f", {OWN: 0.9, GENES: 0.7, UNSCALED: 0.8, bare: 0.4}, [])
    assert said in text_of(render("r", [of_tasks("a", probe=result)], []))
    result = of_task("f", {OWN: 0.9, GENES: 0.7, UNSCALED: 0.8}, [])
    assert "Without a classifier" not in render("r", [of_tasks("a", probe=result)], [])


def test_the_best_row_is_bold_if_a_grid_has_no_place_for_it() -> None:
    bare = make_method("embedding")
    own = make_method("embedding", "LR")
    rows = {bare: 0.9, own: 0.8, make_method("embedding", "kNN"): 0.7}
    page = render("r", [of_tasks("a", probe=of_task("f", rows, []))], [])
    table = page.partition('id="evaluation"')[2].partition("</table>")[0]
    assert len(re.findall(r'<t[rd] class="[^"]*best"', table)) == 1


def test_tasks_that_share_a_sentence_print_it_once() -> None:
    verdict = replace(verdict_on(OWN, GENES, "f", -0.1, (-0.2, -0.05)), column="f")
    result = TaskResult([], verdicts=[verdict])
    runs = [of_tasks("a", reconstruct=result, reconstruct_2=result)]
    sentences = [sentence for _, sentence in summarise_behind(runs)]
    assert sentences == [*dict.fromkeys(sentences)] != []


@pytest.mark.parametrize(
    ("other", "said"),
    [("d2", "has no cells of this dataset"), (None, "is missing or has no cells")],
)
def test_an_absent_umap_is_not_called_a_table(other: str | None, said: str) -> None:
    result = of_task("f", {OWN: 0.9, GENES: 0.7}, [])
    umap = {} if other is None else {other: UmapCells(array("d"), array("d"), b"", {})}
    run = replace(of_tasks("a", probe=result), umap_by_dataset=umap)
    assert f"evaluate/umap.tsv {said}." in text_of(render("r", [run], []))


def test_the_first_sentences_name_tasks_ahead_or_behind() -> None:
    hidden = [
        verdict_on(OWN, GENES, f"{one} by gene", size, (0.01, 0.2))
        for one, size in (("r", 0.06), ("rho", 0.08))
    ]
    run = of_tasks(
        "a",
        probe=of_task("f", {OWN: 0.7, GENES: 0.7}, [verdict_on(OWN, GENES, "f", 0.0, (-0.1, 0.1))]),
        few_shot=of_task(
            "5", {OWN: 0.6, GENES: 0.7}, [verdict_on(OWN, GENES, "f, 5", -0.1, (-0.2, -0.04))]
        ),
        imputation=of_task("r by gene", {OWN: 0.3, GENES: 0.2}, hidden),
        # against nothing but the mean profile
        reconstruct=of_task(
            "f", {}, [compare("prediction", "mean profile", "nats", -0.2, None, True)]
        ),
    )
    assert (
        "Of 4 comparisons with the best baseline of a metric: ahead in 2 (imputation: rho by gene +0.080 and 1 "
        "more), level in 1, behind in 1 (few shot: f, 5 -0.100)."
    ) in text_of(render("r", [run], []))


def test_the_accuracy_of_whole_cells_counts_once_for_each_label() -> None:
    def result(task: str, metric: str, difference: float) -> TaskResult:
        verdict = verdict_on(OWN, GENES, metric, difference, (difference - 0.1, difference + 0.1))
        other = replace(verdict, metric=f"{task} of its own")
        made = of_task("f", {OWN: 0.7, GENES: 0.7}, [verdict, other])
        return replace(made, task=task)

    tasks = {
        "low_depth": result("low_depth", "accuracy, whole", 0.21),
        "missing_genes": result("missing_genes", "accuracy, whole", 0.22),
        "probe": result("probe", "accuracy", 0.23),
        "low_depth of donor": result("low_depth", "accuracy, whole", 0.24),
        "missing_genes of donor": result("missing_genes", "accuracy, whole", 0.25),
        "transfer": result("transfer", "accuracy", 0.26),
    }
    [standing] = list_standings([of_tasks("a", **tasks)])
    whole = [
        (task, verdict.difference)
        for task, verdict in standing.verdicts
        if verdict.metric.startswith("accuracy")
    ]
    assert whole == [("probe", 0.23), ("low_depth of donor", 0.24), ("transfer", 0.26)]
    assert count_outcomes(standing) == (9, 0, 0)


def test_equal_predictions_count_as_undecided() -> None:
    verdict = verdict_on(OWN, GENES, "f", 0.00001, (-0.00001, 0.00003), False, 900)
    run = of_tasks("a", probe=of_task("f", {OWN: 0.7, GENES: 0.7}, [verdict]))
    [standing] = list_standings([run])
    assert count_outcomes(standing) == (0, 0, 0)
    page = render("r", [run], [])
    counts = re.findall(r'data-label="(ahead|level|behind|undecided)">(\d+)<', page)
    assert counts == [("ahead", "0"), ("level", "0"), ("behind", "0"), ("undecided", "1")]
    shown = text_of(page)
    assert "undecided against the best baseline, all genes + LR: 0.700 against 0.700" in shown
    assert "ahead in none, behind in none, undecided in 1." in shown
    assert (
        "embedding + kNN is the same as all genes + LR to three decimals of f: undecided." in shown
    )


def test_standings_have_gpu_hours_and_core_hours_apart() -> None:
    result = of_task("f", {OWN: 0.7, GENES: 0.7}, [verdict_on(OWN, GENES, "f", 0.0, (-0.1, 0.1))])
    runs = []
    for name, gpu_hours in (("a", 2.5), ("b", None)):
        totals = {"gpu_hours": gpu_hours, "cpu_core_hours": 1200.0}
        cost = CostSchema(source="own files", jobs=[], totals=totals, unknown={})
        runs.append(replace(of_tasks(name, probe=result), cost=cost))
    hours = re.findall(r'data-label="(GPU|core)-hours">([^<]*)<', render("r", runs, []))
    assert hours == [("GPU", "2.5"), ("core", "1,200"), ("GPU", "–"), ("core", "1,200")]


def make_cost(gpus: int | None, gpu_hours: float | None) -> CostSchema:
    """Cost of one start, with 31 core-hours."""
    held = {"nodes": 1, "processes": 1, "gpus": gpus, "cpus": 8}
    start = Start("7", "p", "COMPLETED", 0.0, 1.0, 9.0, 1.0, 8.0, **held)
    totals = {"gpu_hours": gpu_hours, "cpu_core_hours": 31.0}
    return CostSchema(source="own files", jobs=[start], totals=totals, unknown={})


@pytest.mark.parametrize(
    ("gpus", "gpu_hours", "described"),
    [
        (0, 0.0, "31 core-hours"),
        (4, 2.53, "2.53 GPU-hours"),
        (4, 1449.2, "1,449 GPU-hours"),
        (4, None, "an unknown number of GPU-hours"),
        (None, None, "an unknown number of GPU-hours"),
    ],
)
def test_the_cost_of_a_run_with_gpus_is_in_gpu_hours(
    gpus: int | None, gpu_hours: float | None, described: str
) -> None:
    run = replace(of_tasks("a"), cost=make_cost(gpus, gpu_hours))
    assert describe_cost(run) == described


def test_a_start_that_never_ran_is_not_in_gpu_hours() -> None:
    """A job of GPUs was cancelled in the queue; the training then ran on CPUs."""
    cost = make_cost(gpus=0, gpu_hours=0.0)
    queued = replace(cost.starts[0], started_at=None, elapsed_s=0.0, gpus=4)
    cost.starts.insert(0, queued)
    assert describe_cost(replace(of_tasks("a"), cost=cost)) == "31 core-hours"


def test_the_first_line_names_effort_fast() -> None:
    verdict = verdict_on(OWN, GENES, "f", 0.0, (-0.1, 0.1))
    result = of_task("f", {OWN: 0.7, GENES: 0.7}, [verdict])
    line = "level with the best baseline, all genes + LR: 0.700 against 0.700 (probe f)"
    full = text_of(render("r", [of_tasks("a", probe=result)], []))
    fast = text_of(render("r", [of_tasks("a", probe=result.mark_fast("2 of 3 seeds"))], []))
    assert f"{line}." in full
    assert f"{line} (effort fast)." in fast


@pytest.mark.parametrize(
    ("low", "outcome", "against"),
    [(0.02, "ahead", UNSCALED), (-0.02, "level", UNSCALED), (None, None, UNTRAINED)],
)
def test_the_best_other_baseline_replaces_an_untrained_one(
    low: float | None, outcome: str | None, against: ScoredMethod
) -> None:
    """With `low` None, there is no other baseline."""
    rows = {OWN: 0.9, UNTRAINED: 0.85} | ({} if low is None else {GENES: 0.7, UNSCALED: 0.8})
    own = OWN.name
    lines = [
        ("f", own, UNTRAINED.name, 0.9 - 0.85, 0.03, 0.07),
        ("g", own, UNSCALED.name, -0.5, -0.6, -0.4),
    ]
    if low is not None:
        lines.append(("f", own, GENES.name, 0.2, 0.1, 0.3))
        lines.append(("f", own, UNSCALED.name, 0.1, low, 0.2))
    result = of_task(
        "f", rows, [verdict_on(OWN, UNTRAINED, "accuracy", 0.9 - 0.85, (0.03, 0.07))], lines
    )
    [found] = list_standings([of_tasks("a", probe=result)])
    assert found.baseline is not None
    assert found.baseline.method == against
    assert (found.verdict and found.verdict.outcome) == outcome
    assert sum(count_outcomes(found)) == (outcome is not None)
    # its untrained network is a baseline to be behind
    result = of_task("f", rows, [verdict_on(OWN, UNTRAINED, "f", -0.1, (-0.2, -0.05))], lines)
    [found] = list_standings([of_tasks("a", probe=result)])
    assert found.count_verdicts("behind") == 1


def test_a_beaten_untrained_network_is_nowhere_best_baseline() -> None:
    ahead = verdict_on(OWN, UNTRAINED, "f", 0.05, (0.03, 0.07))
    lines = [
        ("f", OWN.name, UNTRAINED.name, 0.05, 0.03, 0.07),
        ("f", OWN.name, GENES.name, 0.1, 0.05, 0.15),
    ]
    rows = {OWN: 0.9, UNTRAINED: 0.85, GENES: 0.8}
    result = of_task("f", rows, [ahead], lines)
    run = of_tasks("a", probe=result)
    assert run.evaluation is not None
    evaluation = replace(run.evaluation, model={"step": 20})
    run = replace(run, evaluation=evaluation, evaluation_by_step={10: evaluation})
    [(_, chart)] = make_checkpoint_charts(run, "d")
    assert chart.rows[-1]["name"] == f"{GENES.name} (best baseline)"
    page = render("r", [run], [])
    table = page[page.index('aria-label="probe"') :]
    assert re.findall(r'<td class="n underlined">([^<]*)</td>', table) == ["0.800"]
    assert f"best baseline 0.800 ({GENES.name})" in describe_result(result)
    # the untrained network counts while the model is not ahead of it
    level = of_task("f", rows, [verdict_on(OWN, UNTRAINED, "f", 0.05, (-0.01, 0.1))], lines)
    assert level.best_baseline("f") == result.rows[1]


def test_a_replaced_verdict_keeps_its_number_of_units() -> None:
    verdict = verdict_on(OWN, UNTRAINED, "accuracy", 0.05, (0.03, 0.07))
    lines = [("f", OWN.name, UNTRAINED.name, 0.05, 0.03, 0.07)]
    result = of_task("f", {OWN: 0.9, UNTRAINED: 0.85, GENES: 0.8}, [verdict], lines)
    same = Difference("f", OWN.name, GENES.name, 0.1, 0.1, 0.1, 0.0, n=5)
    result = replace(result, differences=[*result.differences, same])
    [found] = result.best_verdicts()
    assert found.sentence == (
        f"{OWN.name} against {GENES.name}: +0.100 accuracy, undecided, all 5 differ by the same."
    )


def test_a_run_has_one_next_step() -> None:
    level = of_task("f", {OWN: 0.7, GENES: 0.7}, [verdict_on(OWN, GENES, "f", 0.0, (-0.1, 0.1))])
    run = replace(of_tasks("a", probe=level), plan=PlanSchema(steps=390, steps_per_epoch=13))
    text = text_of(render("r", [run], []))
    assert "Next: set train.steps: auto, which is 1,600 steps and not 390" in text
    assert "take the best baseline" not in text
    assert "Next: take the best baseline" in text_of(render("r", [replace(run, plan=None)], []))


def test_runs_that_are_level_share_the_first_sentence(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name) for name in ("first", "second")]
    for folder in folders:
        totals = dict.fromkeys([*TOTALS, "max_memory_gb"])
        cost = {
            "source": "own files",
            "jobs": [],
            "totals": totals,
            "unknown": {"max_memory_gb": "nobody knows"},
        }
        write(folder / "train/cost.json", cost)
    text = text_of(rendered(*folders))
    assert (
        "first and second cannot be told apart on pbmc over the task that all have (probe); first has the highest "
        "mean: behind the best baseline, all genes + LR: 0.800 against 0.840 (probe accuracy)."
    ) in text
    assert (
        "Next for first, second: set train.steps: auto, which is 1,600 steps and not 200, and train anew"
        in text
    )
    assert (
        "first: peak memory of a node, GB, nobody knows. second: peak memory of a node, GB, nobody knows."
        in text
    )


def test_each_objective_has_a_chart_of_its_losses() -> None:
    lines = [LoggedLineSchema(step=1, loss=2.0)]
    options = [
        {"objective": {"name": name}}
        for name in ("cell_decoding", "classification", "cell_decoding")
    ]
    runs = [
        ReportedRun(name, None, None, RunRecordSchema(options=of), None, None, logged_lines=lines)
        for name, of in zip("abc", options)
    ]
    first, second = make_loss_charts(runs)
    assert (first.title, second.title) == ("Loss: cell decoding", "Loss: classification")
    assert first.spec["encoding"]["color"]["legend"] == {"values": ["a", "c"]}
    assert [row["name"] for row in second.rows] == ["b"]
    [alone] = make_loss_charts(runs[:1])
    assert alone.title == "Loss"
    assert alone.spec["encoding"]["color"]["legend"] is None
    unknown = ReportedRun("d", None, None, None, None, None, logged_lines=lines)
    assert [chart.title for chart in make_loss_charts([*runs[:1], unknown])] == [
        "Loss: cell decoding",
        "Loss: unknown objective",
    ]


@pytest.mark.parametrize(("key", "has_note"), [("loss", True), ("lr", False)])
def test_the_note_on_losses_needs_a_chart_of_losses(key: str, has_note: bool) -> None:
    lines = [LoggedLineSchema.model_validate({"step": 1, key: 2.0})]
    runs = [replace(of_tasks(name), logged_lines=lines) for name in ("a", "b")]
    assert ("Losses are comparable only" in render("r", runs, [])) == has_note


def test_runs_without_points_are_not_in_the_legend() -> None:
    points = [(1, 2.0), (2, 1.0)]
    curves = make_curves_chart("lr", {"a": points, "b": [], "c": points}, "lr")
    losses = make_loss_chart("Loss", {"a": {"training": points}, "b": {"training": []}, "c": {}})
    legends = [chart.spec["encoding"]["color"]["legend"] for chart in (curves, losses)]
    assert legends == [{"values": ["a", "c"]}, {"values": ["a"]}]


@pytest.mark.full
def test_a_page_of_ten_runs_is_less_than_4_mb(tmp_path: Path) -> None:
    numbers = np.random.Generator(np.random.Philox(key=1)).normal(size=(1000, 8))
    keys = ("loss", "grad_norm", "lr", "cells_per_s", "data_wait_frac", "depth_r2", "batch_r2")
    lines = [
        {"step": step} | dict(zip(keys, map(abs, row)))
        for step, row in enumerate(numbers[:200].tolist())
    ]
    umap = [
        f"pbmc\tc{i}\t{i % 7}\t{row[0]:.4f}\t{row[1]:.4f}\t{i % 2}\t1"
        for i, row in enumerate(numbers)
    ]
    for number in range(10):
        folder = make_run(tmp_path / f"run{number}")
        write(folder / "train/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        write(
            folder / "evaluate/umap.tsv",
            "dataset\tobs_name\tlabel\tx\ty\theldout\tbatch\n" + "\n".join(umap),
        )
    page = rendered(*sorted(tmp_path.iterdir()))
    assert len(page.encode()) < 4e6


def test_the_static_umap_has_its_colours_in_fewer_bytes() -> None:
    spec = {
        "data": {"values": [{"x": value, "y": value % 7} for value in range(50)]},
        "mark": {"type": "point", "filled": True},
        "encoding": {
            axis: {"field": axis, "type": "quantitative", "axis": {"grid": False}} for axis in "xy"
        },
    }
    png = vl_convert.vegalite_to_png(spec)
    smaller = shrink_png(png)
    assert len(smaller) < len(png) / 3
    pixels, shown = pixels_of(png), pixels_of(smaller)
    assert shown.shape == pixels.shape
    is_seen = pixels[..., 3] >= 16
    assert is_seen.any()
    # 4 bits a channel, and at most 256 colours
    assert np.abs(shown[is_seen].astype(int) - pixels[is_seen]).max() < 32
    assert not shown[~is_seen].any()
    assert len(np.unique(shown.reshape(-1, 4), axis=0)) <= 256
    lines = chunks_of(png)[b"IDAT"]
    other = zlib.compress(b"\0" + zlib.decompress(lines)[1:])
    unfiltered = png.replace(lines, other)
    assert shrink_png(unfiltered) == unfiltered


def chunks_of(png: bytes) -> dict[bytes, bytes]:
    """Chunks of a PNG by kind, whose checksums must be right; those of pixels as one."""
    chunks: dict[bytes, bytes] = {}
    begin = 8
    while begin < len(png):
        end = begin + 8 + int.from_bytes(png[begin : begin + 4], "big")
        kind, data = png[begin + 4 : begin + 8], png[begin + 8 : end]
        assert png[end : end + 4] == zlib.crc32(kind + data).to_bytes(4, "big")
        chunks[kind] = chunks.get(kind, b"") + data
        begin = end + 4
    return chunks


def pixels_of(png: bytes) -> np.ndarray:
    """(height, width, 4) uint8, of a PNG with a palette or with 32 bits a pixel."""
    chunks = chunks_of(png)
    width, height, _, kind = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    if kind == 3:
        assert not lines[:, 0].any()
        colours = np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)
        alphas = np.frombuffer(chunks[b"tRNS"], np.uint8)
        return np.column_stack([colours, alphas])[lines[:, 1:]]
    assert (lines[:, 0] == 1).all()
    return lines[:, 1:].reshape(height, width, 4).cumsum(axis=1, dtype=np.uint8)


def test_planned_tensors_stand_next_to_measured_tensors() -> None:
    plan = PlanSchema.model_validate({"memory": {"total_bytes": 46_000_000}})
    on_cpu = ReportedRun(
        "r",
        plan,
        None,
        None,
        None,
        None,
        logged_lines=[LoggedLineSchema(step=1, peak_resident_gb=[1.9, 2.13])],
    )
    line = LoggedLineSchema(step=1, peak_allocated_gb=[0.0512, 0.05], peak_resident_gb=[2.1, 2.0])
    tensors = "peak tensor memory on any rank, GB"
    process = "peak memory of any process, libraries included, GB"
    for run, measured, rank in (
        (on_cpu, None, 1),
        (replace(on_cpu, logged_lines=[line, LoggedLineSchema(step=2)]), 0.051, 0),
    ):
        rows = {name: (planned, seen) for name, planned, seen in compare_with_plan(run)}
        kind = "process" if measured is None else "tensor"
        assert rows[tensors] == (0.046, measured)
        assert rows[process] == (None, 2.1)
        assert rows[f"rank with the peak {kind} memory"] == (None, rank)


def test_each_file_has_the_command_that_makes_it_again(page: str) -> None:
    text = text_of(page)
    for file in ("plan.json", "evaluate/metrics.json"):
        assert f"{file} snakemake --profile PROFILE --force results/runs/first/{file}" in text
    trained = "results/runs/first/train"
    moved = (
        f"mv {trained} {trained}.$(date +%s) && snakemake --profile PROFILE {trained}/status.json"
    )
    assert f"train/status.json {moved}" in text
    assert (
        "shards/manifest.json snakemake --profile PROFILE --force results/corpora/pbmc/shards/manifest.json"
        in text
    )
    assert f"--force 'results/runs/{EVIL}/plan.json'" in text, "what a shell would read is quoted"
    assert "embeddings/" not in text, "a file that is not there"
