"""Stage evaluate: only held-out cells, reproducible numbers, any task by name, one-line errors."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import EntryPoint
from multiprocessing import active_children
from pathlib import Path
from typing import Any, ClassVar, Literal

import anndata as ad
import numpy as np
import pytest
import torch

from cellmill.config import plugin
from cellmill.config.options import EvaluateOptions
from cellmill.config.parts.tasks import TaskConfig
from cellmill.data.inputs.formats import open_counts
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate import run
from cellmill.evaluate.inference.umap import read_umap
from cellmill.evaluate.task import Context
from cellmill.report.collect import read_run
from cellmill.report.page import render
from cellmill.runs.results import Row, ScoredMethod, TaskResult, compare
from cellmill.stages import evaluate as stage
from tests.cluster.rig import living, wait
from tests.unit.evaluated import evaluate, make_evaluated, with_config, with_obs


def test_only_cells_of_the_test_split_are_scored(corpus: dict[str, Path], tmp_path: Path) -> None:
    manifest = Manifest.read(corpus["manifest"])
    metrics = evaluate(corpus, tmp_path / "metrics.json")
    dataset = metrics["datasets"]["simulated"]
    assert dataset["n_scored"] == manifest.splits["test"].n_obs
    assert dataset["in_corpus"] is True
    test = {
        name.partition(":")[2]
        for shard in manifest.splits["test"].shards
        for name in ad.read_h5ad(manifest.shard_path(shard)).obs_names
    }
    cells = read_umap(tmp_path / "umap.tsv")
    assert {name for name, heldout in zip(cells.obs_name, cells.heldout) if heldout == "1"} == test
    assert len(cells.obs_name) == dataset["n_cells"]
    probe = dataset["tasks"]["probe"]["figures"]
    assert sum(probe["classes"].values()) == probe["n_cells"]
    assert probe["n_cells"] + sum(probe["dropped_classes"].values()) == len(test)
    assert metrics["fingerprint"] == manifest.fingerprint


def test_initial_weights_are_level_with_untrained_ones(
    corpus: dict[str, Path], tmp_path: Path
) -> None:
    both = [evaluate(corpus, tmp_path / name / "metrics.json", seed=0) for name in "ab"]
    assert both[0] == both[1]
    for name in ("scores.csv", "umap.tsv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    # the exported model has the initial weights of seed 0, like the untrained one
    names = "embedding + logistic regression", "untrained + logistic regression"
    differences = both[0]["datasets"]["simulated"]["tasks"]["probe"]["differences"]
    [entry] = (
        of
        for of in differences
        if (of["column"], of["compared"], of["against"]) == ("accuracy", *names)
    )
    assert (entry["mean"], entry["low"], entry["high"]) == (0, 0, 0)


def test_effort_fast_is_full_with_fewer_repetitions(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probes = {"full": {"seeds": 1}, "fast": {"seeds": 3}}
    results = {}
    for effort, options in probes.items():
        out = tmp_path / effort / "metrics.json"
        metrics = evaluate(corpus, out, effort=effort, tasks={"probe": options})
        results[effort] = metrics["datasets"]["simulated"]["tasks"]["probe"]
        assert metrics["options"].get("effort", "full") == effort
    log = capsys.readouterr().out
    assert "effort fast leaves out the UMAP; 2 of 3 seeds of probe\n" in log
    lines = [line for line in log.splitlines() if line.startswith("simulated: probe: accuracy ")]
    assert [" (effort fast); took " in line for line in lines] == [False, True]
    full = results["full"]
    fast = results["fast"]
    assert fast["rows"] == full["rows"]
    assert fast["verdicts"] == [verdict | {"effort": "fast"} for verdict in full["verdicts"]]
    marked = [sentence.replace(" (effort fast).", ".") for sentence in fast["sentences"]]
    assert marked == [*full["sentences"], "Effort fast left out 2 of 3 seeds."]
    assert marked != fast["sentences"]
    omitted = {"effort": "fast", "left_out": "2 of 3 seeds"}
    assert fast["figures"] == full["figures"] | omitted
    assert not any(read_umap(tmp_path / "fast" / "umap.tsv"))


def test_effort_fast_reduces_every_task_with_repetitions() -> None:
    names = ("probe", "few_shot", "low_depth", "missing_genes", "clustering", "imputation")
    tasks: dict[str, Any] = {name: {} for name in names}
    section = EvaluateOptions.model_validate({"evaluate": {"tasks": tasks, "effort": "fast"}})
    reduced, left_out = section.evaluate.reduce_effort()
    assert left_out == {
        "probe": ["4 of 5 seeds"],
        "few_shot": ["7 of 10 draws"],
        "low_depth": ["2 of 3 repeats", "1 of 2 count_fracs"],
        "missing_genes": ["2 of 3 repeats", "1 of 2 genes"],
        "clustering": ["4 of 5 seeds", "all resolutions but the fixed one"],
        "imputation": ["2 of 3 seeds"],
    }
    assert reduced.tasks["clustering"].model_dump()["resolutions"] == [1.0]
    assert reduced.reduce_effort()[0] == reduced
    full = section.evaluate.model_copy(update={"effort": "full"})
    assert full.reduce_effort() == (full, {})


@pytest.mark.full
def test_all_cells_are_scored_on_request(corpus: dict[str, Path], tmp_path: Path) -> None:
    few: dict[str, Any] = {"tasks": {"reconstruct": {}}}
    dataset = evaluate(corpus, tmp_path / "metrics.json", cells="all", **few)["datasets"][
        "simulated"
    ]
    assert dataset["n_scored"] == dataset["n_cells"] == 600
    other = with_obs(corpus, tmp_path, "elsewhere")
    dataset = evaluate(other, tmp_path / "metrics.json", cells="all", **few)["datasets"][
        "elsewhere"
    ]
    assert dataset["n_scored"] == 600
    assert dataset["in_corpus"] is False
    # copies of training cells in a dataset of another name, and with other genes around theirs, are
    # not held out
    splits = Manifest.read(corpus["manifest"]).splits
    assert dataset["n_copies"] == splits["train"].n_obs + splits["val"].n_obs
    dataset = evaluate(other, tmp_path / "metrics.json", **few)["datasets"]["elsewhere"]
    assert dataset["n_scored"] == splits["test"].n_obs


@pytest.mark.full
@pytest.mark.parametrize(
    ("column", "said"),
    [("cell_type", "supervised by this label (cell_type)"), ("donor", "supervised by donor")],
)
def test_a_model_trained_with_labels_is_marked_supervised(
    corpus: dict[str, Path], tmp_path: Path, column: str, said: str
) -> None:
    model = with_config(
        shutil.copytree(corpus["model"], tmp_path / "model"), supervised_by=[column]
    )
    dataset = evaluate(corpus | {"model": model}, tmp_path / "evaluate" / "metrics.json")
    assert dataset["model"]["supervised_by"] == [column]
    tasks = dataset["datasets"]["simulated"]["tasks"]
    probe = tasks["probe"]
    own = [row["name"] for row in probe["rows"] if row["method"]["kind"] == "model"]
    assert f"embedding, {said} + kNN" in own
    assert all(name.startswith(f"embedding, {said} + ") for name in own)
    assert not any(
        "supervised" in row["name"] for row in probe["rows"] if row["method"]["kind"] == "baseline"
    )
    for task in tasks.values():
        assert task["sentences"]
        assert all(said in sentence for sentence in task["sentences"])
    page = render("x", [read_run(tmp_path)], [])
    # runs, comparisons, heading
    assert page.count(f'<span class="tag">supervised by {column}</span>') >= 3
    assert ("The label is <b>cell_type</b>, which the model was trained with." in page) == (
        column == "cell_type"
    )


def test_without_a_label_only_the_probe_is_skipped(corpus: dict[str, Path], tmp_path: Path) -> None:
    dataset = evaluate(corpus, tmp_path / "metrics.json", "-")["datasets"]["simulated"]
    assert dataset["roles"] == {}
    assert dataset["tasks"]["probe"]["skipped"] == "the dataset has no label column"
    assert dataset["tasks"]["reconstruct"]["figures"]["n_targets"] > 0
    assert {*read_umap(tmp_path / "umap.tsv").label} == {""}


def test_every_label_has_its_rows(
    corpus: dict[str, Path], tmp_path: Path, toy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Context] = []
    monkeypatch.setattr(Toy, "run", lambda _, context: seen.append(context) or TaskResult())
    tasks = {"toy": {}, "probe": {"seeds": 1}}
    both, one = (
        evaluate(corpus, tmp_path / f"{label}.json", label, tasks=tasks)["datasets"]["simulated"]
        for label in ("cell_type|batch", "batch")
    )
    assert list(both["tasks"]) == ["toy", "probe", "probe of batch"]
    assert both["roles"] == {"label": "cell_type", "label 2": "batch"}
    assert both["n_scored"] == one["n_scored"]
    assert both["scored_digest"] != one["scored_digest"]
    assert both["tasks"]["probe of batch"] == one["tasks"]["probe"]
    with open_counts(corpus["cells"]) as reader:
        for role in ("batch", "perturbation"):
            assert (seen[0].roles[role] == reader.obs[role]).all()


def test_rare_classes_are_left_out_by_name(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = np.array(["a", "b"], dtype=object)[np.arange(600) % 2]
    labels[:3], labels[3:10] = "rare", None
    common = np.array(["common"] * 597 + ["rare"] * 3, dtype=object)
    changed = with_obs(corpus, tmp_path, "elsewhere", mine=labels, common=common)
    metrics = evaluate(
        changed,
        tmp_path / "metrics.json",
        "mine|common",
        cells="all",
        tasks={"probe": {"seeds": 1}},
    )
    tasks = metrics["datasets"]["elsewhere"]["tasks"]
    assert tasks["probe"]["figures"]["dropped_classes"] == {"rare": 3}
    assert tasks["probe"]["figures"]["n_unlabelled"] == 7
    assert "; classes of too few cells left out: rare 3; took " in capsys.readouterr().out
    assert tasks["probe of common"]["rows"] == []
    assert tasks["probe of common"]["skipped"] == (
        "expected at least two classes of common with 5 or more scored cells each (evaluate.folds), got 1; "
        "lower evaluate.folds"
    )


def test_labels_that_cannot_be_probed_are_refused_in_one_line(
    corpus: dict[str, Path], tmp_path: Path
) -> None:
    changed = with_obs(corpus, tmp_path, "simulated", one="same", none=np.nan)
    remedy = (
        "expected two classes or more for task probe: name another label column, or leave it empty$"
    )
    for label, message in (
        (
            "cell_tipe",
            r"no obs column 'cell_tipe' \(--labels\); did you mean 'cell_type'\?$",
        ),
        ("one", f"obs column 'one' has one class, 'same'; {remedy}"),
    ):
        with pytest.raises(DataError, match=message):
            evaluate(changed, tmp_path / "metrics.json", label)
    assert not (tmp_path / "metrics.json").exists()


def test_tasks_that_need_a_label_are_skipped_without_one(
    corpus: dict[str, Path], tmp_path: Path
) -> None:
    """Its cells may all have a text that means no label, and other datasets be labelled."""
    changed = with_obs(corpus, tmp_path, "simulated", none=np.nan)
    tasks = evaluate(changed, tmp_path / "metrics.json", "none")["datasets"]["simulated"]["tasks"]
    assert tasks["probe"]["skipped"] == "no cell has a label in obs column 'none'"
    assert tasks["reconstruct"]["skipped"] is None


def test_the_log_has_one_short_line_per_task(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = np.array([f"c{i % 60}" for i in range(600)], dtype=object)
    changed = with_obs(corpus, tmp_path, "many", mine=labels)
    capsys.readouterr()
    metrics = evaluate(
        changed, tmp_path / "metrics.json", "mine", cells="all", tasks={"probe": {"seeds": 1}}
    )
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("many: probe: ")
    ]
    probe = metrics["datasets"]["many"]["tasks"]["probe"]
    best = max(
        row["scores"]["accuracy"]["mean"]
        for row in probe["rows"]
        if row["method"]["kind"] == "model"
    )
    assert len(lines) == 1
    assert lines[0].startswith(f"many: probe: accuracy {best:.3f} (embedding + ")
    assert "; best baseline " in lines[0]
    assert len(lines[0]) < 200


def test_files_that_do_not_pair_up_are_refused(corpus: dict[str, Path], tmp_path: Path) -> None:
    options = EvaluateOptions.model_validate({"evaluate": {}})
    shared = {
        "options": options,
        "model": corpus["model"],
        "manifest": corpus["manifest"],
        "out": tmp_path / "m.json",
    }
    with pytest.raises(ConfigError, match=r"got 1 cells files, 1 embeddings and 2 labels$"):
        stage.evaluate(
            cells=[corpus["cells"]], embeddings=[corpus["embedding"]], labels=["a", "b"], **shared
        )
    with pytest.raises(ConfigError, match=r"^--cells: two files are called 'simulated'; "):
        stage.evaluate(
            cells=2 * [corpus["cells"]],
            embeddings=2 * [corpus["embedding"]],
            labels=["-", "-"],
            **shared,
        )


def test_an_unwritable_output_is_refused_at_the_start(
    corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_Evaluation", lambda *_: pytest.fail("it has begun"))
    for out, message in (
        (
            corpus["model"] / "config.json",
            "config.json is a file of --model, which would be lost; name another file$",
        ),
        (
            tmp_path / "scores.csv",
            "scores.csv is the file of another result, which would be lost; name another file$",
        ),
        (tmp_path, "Is a directory; name another file$"),
        (corpus["cells"] / "metrics.json", "(Not a directory|File exists); name another file$"),
    ):
        with pytest.raises(ConfigError, match=f"^--out .*{message}"):
            evaluate(corpus, out)


def test_a_killed_process_of_the_umap_is_named(corpus: dict[str, Path], tmp_path: Path) -> None:
    end = stage._umap_process().submit(os._exit, 9)
    assert isinstance(end.exception(), BrokenProcessPool)
    with pytest.raises(DataError, match=r"^a process of the evaluation ended; "):
        evaluate(corpus, tmp_path / "metrics.json")
    assert not (tmp_path / "metrics.json").exists()
    stage._umap_process.cache_clear()


def test_a_corpus_without_held_out_cells_names_the_remedy(tmp_path: Path, simulated: Path) -> None:
    corpus = make_evaluated(tmp_path, simulated, test_frac=0)
    message = "no held-out cells: all 600 were trained or validated on; raise shard.test_frac, or set evaluate.cells to"
    with pytest.raises(DataError, match=message):
        evaluate(corpus, tmp_path / "metrics.json")


class ToyConfig(TaskConfig):
    """Options of the toy task."""

    implementation: ClassVar[str] = f"{__name__}:Toy"

    name: Literal["toy"] = "toy"
    scale: float = 1.0


class Toy:
    """Ranks the model against a baseline by the number of scored cells."""

    def __init__(self, config: ToyConfig) -> None:
        self.scale = config.scale

    def run(self, context: Context) -> TaskResult:
        cells = self.scale * int(context.scored.sum())
        numbers = {"cell_score": cells, "runs": [1, 2]}
        rows = [
            Row(ScoredMethod("ours", kind="model"), numbers=numbers),
            Row(ScoredMethod("theirs"), numbers={"cell_score": cells + 1, "runs": []}),
        ]
        verdicts = [compare("ours", "theirs", "cell score", -1.0)]
        width = context.vectors.shape[1] if self.scale else float("nan")
        return TaskResult(rows, "cell_score", verdicts, {"width": width})


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy task, as of an installed package."""
    point = EntryPoint("toy", f"{__name__}:ToyConfig", "cellmill.task")
    monkeypatch.setattr(
        plugin, "entry_points", lambda group: [point] if group == "cellmill.task" else []
    )


def test_a_plugin_task_reaches_metrics_and_the_page(
    corpus: dict[str, Path], tmp_path: Path, toy: None
) -> None:
    metrics = evaluate(
        corpus, tmp_path / "run" / "evaluate" / "metrics.json", tasks={"toy": {"scale": 2}}
    )
    assert metrics["options"]["tasks"] == {"toy": {"name": "toy", "scale": 2.0}}
    dataset = metrics["datasets"]["simulated"]
    assert list(dataset["tasks"]) == ["toy"]
    result = dataset["tasks"]["toy"]
    score = 2.0 * dataset["n_scored"]
    [ours, _] = result["rows"]
    assert (ours["name"], ours["method"]["kind"]) == ("ours", "model")
    assert ours["numbers"] == {"cell_score": score, "runs": [1, 2]}
    sentence = "ours is behind theirs by 1.000 cell score (no interval)."
    assert (result["sentences"], result["verdicts"][0]["outcome"]) == ([sentence], "behind")
    page = " ".join(re.sub(r"<[^>]*>", " ", render("r", [read_run(tmp_path / "run")], [])).split())
    for text in (
        "toy: cell score",
        f"theirs best {score + 1:g}",
        f"simulated: {sentence}",
        "width 16",
    ):
        assert text in page, text
    with pytest.raises(
        DataError,
        match=r"^simulated: task 'toy' failed \(ValueError: Out of range.*\); its traceback is above; repair or",
    ):
        evaluate(corpus, tmp_path / "nan.json", tasks={"toy": {"scale": 0}})


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_parallel_tasks_give_the_results_of_one_process(
    corpus: dict[str, Path], tmp_path: Path, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: dict[str, Any] = {"probe": {"seeds": 1}, "few_shot": {"draws": 2}, "reconstruct": {}}
    found = []
    saved = []
    for n in (2, 1):
        monkeypatch.setattr(run, "MAX_PROCESSES", n)
        folder = tmp_path / f"{n}"
        found.append(evaluate(corpus | {"baselines": folder}, folder / "metrics.json", tasks=tasks))
        saved.append(np.load(folder / "simulated.npz"))
    assert found[0] == found[1]
    assert [*found[0]["datasets"]["simulated"]["tasks"]] == [*tasks]
    assert saved[0].files
    assert {*saved[0].files} == {*saved[1].files}


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: os._exit(9), "^a process of the evaluation ended; lines above may say why. "),
        (lambda: 1 / 0, r"^simulated: task 'toy' failed \(ZeroDivisionError: division by zero\); "),
    ],
    ids=["killed", "failed"],
)
def test_a_killed_task_is_one_line(
    corpus: dict[str, Path],
    tmp_path: Path,
    toy: None,
    two_threads: None,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[], None],
    message: str,
) -> None:
    monkeypatch.setattr(Toy, "run", lambda *_: end())
    with pytest.raises(DataError, match=message):
        evaluate(corpus, tmp_path / "metrics.json", tasks={"toy": {}, "probe": {}})
    assert not (tmp_path / "metrics.json").exists()
    assert [process for process in active_children() if "ForkProcess" in process.name] == []


def test_ctrl_c_during_a_fork_still_ends_the_evaluation(
    corpus: dict[str, Path],
    tmp_path: Path,
    two_threads: None,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    # a shell's background jobs ignore it
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, earlier))
    submit = run.ProcessPoolExecutor.submit
    submitted = []

    def interrupted(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        submitted.append(given)
        return submit(*given)

    monkeypatch.setattr(stage, "_start_umap", lambda *_: list)
    monkeypatch.setattr(run.ProcessPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(corpus, tmp_path / "metrics.json")
    stage._umap_process.cache_clear()  # its process has ended too
    assert len(submitted) == 2
    assert wait(lambda: active_children() == [], 10)


@pytest.mark.parametrize("started", [False, True])
def test_the_umap_process_ends_with_its_evaluation(
    started: bool,
) -> None:
    code = (
        "import os, signal, time; from multiprocessing import active_children\n"
        "from cellmill.stages.evaluate import _umap_process\n"
        "pool, [child] = _umap_process(), active_children()\n"
        f"for _ in range({2 * started + 1}):\n"
        "    os.kill(child.pid, signal.SIGINT)\n"
        f"    {started} and pool.submit(os.getpid).result()\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as evaluation:
        assert evaluation.stdout is not None
        pid = int(evaluation.stdout.readline())
        evaluation.kill()
        assert wait(lambda: not living(pid), 10)
        assert "Traceback" not in evaluation.communicate()[1]


def test_a_run_with_only_skipped_tasks_is_not_shown_as_scored(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run" / "evaluate" / "metrics.json"
    tasks = {"probe": {}, "few_shot": {}}
    metrics = evaluate(corpus, out, "-", tasks=tasks)
    skipped = {
        name: entry["skipped"] for name, entry in metrics["datasets"]["simulated"]["tasks"].items()
    }
    assert all(skipped.values())
    words = [f"simulated, {name}: {reason}" for name, reason in skipped.items()]
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"warning: nothing was scored, because every task was skipped ({'; '.join(words)}) -> {out}"
    )
    page = render("x", [read_run(tmp_path / "run")], [])
    first = re.search(r"<h2>Overview</h2>\s*<p[^>]*>(.*?)</p>", page, re.S)
    assert first is not None
    reasons = "; ".join(f"{name.replace('_', ' ')}: {reason}" for name, reason in skipped.items())
    assert re.sub("<[^>]+>", "", first[1]) == (
        f"run on simulated: nothing was scored, because every task was skipped ({reasons})."
    )


def test_the_last_line_of_an_evaluation_names_what_was_skipped(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "metrics.json"
    metrics = evaluate(corpus, out, "-", tasks={"probe": {}, "reconstruct": {}})
    reason = metrics["datasets"]["simulated"]["tasks"]["probe"]["skipped"]
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"1 of 2 tasks scored, skipped: simulated, probe: {reason} -> {out}"
