"""External models: their options, what a command may write, presets, and rows beside the model's."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from cellmill import open_cells
from cellmill.cli import main
from cellmill.config import load_config
from cellmill.config.evaluate import Evaluate, ExternalModel, command_words
from cellmill.data.arrays import log_normalise
from cellmill.data.inputs.formats import open_counts
from cellmill.data.prepare.unpack import plain_cells
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.features.components import pca
from cellmill.evaluate.seen.held_out_check import HeldOutCheck
from cellmill.report.collect import read_run
from cellmill.report.page import render
from cellmill.report.standings import list_standings
from tests.unit.evaluated import BRIDGES, evaluate

SCRIPT = """
import sys
import anndata as ad
import numpy as np
cells = ad.read_h5ad(sys.argv[1])
counts = cells.X.toarray().astype(float)
counts = np.log1p(1e4 * counts / counts.sum(1, keepdims=True))
u, s, _ = np.linalg.svd(counts - counts.mean(0), full_matrices=False)
made = ad.AnnData(obs=cells.obs[[]], obsm={"X_emb": (u * s)[:, :7]})
CHANGE
made.write_h5ad(sys.argv[2])
"""


def command_of(folder: Path, change: str = "") -> str:
    """Command of a script that embeds by principal components, with a line changed."""
    script = folder / "embed it.py"
    script.write_text(SCRIPT.replace("CHANGE", change))
    return f"{sys.executable} {shlex.quote(str(script))} {{cells}} {{out}}"


def embed_external(command: str, cells: Path, out: Path) -> int:
    return main(
        [
            "embed_external",
            "--name",
            "pca",
            f"--command={command}",
            "--input",
            str(cells),
            "--out",
            str(out),
        ]
    )


def test_no_shell_reads_a_path() -> None:
    words = command_words("run 'a b' --in={cells} {out}.x ; $HOME", "c; {out} d", "o u t")
    assert words == ["run", "a b", "--in=c; {out} d", "o u t.x", ";", "$HOME"]


@pytest.mark.parametrize(
    ("external", "message"),
    [
        (
            {"a": {"command": "run {cells}"}},
            "expected {out} among its arguments, got 'run {cells}'",
        ),
        ({"a": {"command": "run '{cells} {out}"}}, "(No closing quotation)"),
        (
            {"a b": {"command": "run {cells} {out}"}},
            "'a b' is no name; use letters, digits, '_', '.' and '-'",
        ),
        ({"a": {"preset": "scvii"}}, "no preset 'scvii'; did you mean 'scvi'?"),
        ({"a": {"preset": "pca"}}, "no preset 'pca'; there are: scvi, harmony"),
        (
            {"a": {"preset": "scvi", "command": "run {cells} {out}"}},
            "model or command, got preset and command; set",
        ),
        ({"a": {}}, "expected preset, model or command, got none; set one of them"),
        (
            {"a": {"model": "./m", "files": ["a.py"]}},
            "files: expected none without a command; leave them out",
        ),
    ],
)
def test_an_impossible_external_model_is_refused(external: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match="1 validation error") as raised:
        Evaluate.model_validate({"external": external})
    assert message in str(raised.value)


@pytest.mark.full
def test_a_model_that_fails_says_how_to_give_options(
    corpus: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    command = Evaluate.model_validate({"external": {"a": {"model": "./gone"}}}).external["a"].line
    assert command is not None
    assert embed_external(command, corpus["cells"], tmp_path / "out.h5ad") == 2
    words = f"for other options set evaluate.external.pca.command to {command!r} with them"
    assert words in capsys.readouterr().err


def test_without_external_models_the_options_are_what_they_were() -> None:
    assert "external" not in Evaluate().model_dump(mode="json")
    given = {"a": {"command": "run {cells} {out}"}}
    assert Evaluate.model_validate({"external": given}).model_dump(mode="json")["external"] == {
        "a": {"command": "run {cells} {out}", "files": []}
    }
    one, other = (
        Evaluate.model_validate({"external": {"a": {**given["a"], "files": f}}})
        for f in ([], ["s.py"])
    )
    assert one.external["a"].digest != other.external["a"].digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("print('why'); sys.exit(3)", "it ended with exit status 3; its last lines are above"),
        pytest.param(
            "import os; os.kill(os.getpid(), 9)",
            "it was ended by signal 9; its last lines are above",
            marks=pytest.mark.full,
        ),
        ("sys.exit()", "it ended well and wrote no file to {out}"),
        (
            "made = made[:5].copy()",
            "expected the ALL cells of {cells} in their order, got 5; the first that differs is cell 6, no cell "
            "instead of SIXTH",
        ),
        (
            "made.obsm['X_emb'][2, 1] = np.nan",
            "1 cells have numbers in obsm['X_emb'] that are not finite, the first is THIRD; expected an embedding of "
            "every cell",
        ),
        (
            "del made.obsm['X_emb']",
            "expected a dense array of numbers in obsm['X_emb'] or obsm['X_cellmill'] or X, got no dense array",
        ),
        (
            "made.obsm['X_emb'] = made.obsm['X_emb'][:, :0]",
            "expected ALL rows in obsm['X_emb'], got shape (ALL, 0)",
        ),
    ],
)
def test_mistakes_in_a_command_are_refused_in_one_line(
    change: str,
    message: str,
    corpus: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "made" / "out.h5ad"
    assert embed_external(command_of(tmp_path, change), corpus["cells"], out) == 2
    names = open_cells(corpus["cells"]).obs_names
    for word, value in (
        ("SIXTH", repr(names[5])),
        ("THIRD", repr(names[2])),
        ("ALL", str(len(names))),
    ):
        message = message.replace(word, value)
    [line] = capsys.readouterr().err.splitlines()  # that of the command is another process's
    assert line == f"cellmill embed_external: evaluate.external.pca.command: {message}"
    assert list(out.parent.iterdir()) == []


def test_a_program_that_cannot_be_run_is_named(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        embed_external("./no-such-program {cells} {out}", corpus["cells"], tmp_path / "out.h5ad")
        == 2
    )
    assert capsys.readouterr().err == (
        "cellmill embed_external: evaluate.external.pca.command: './no-such-program' cannot be run: No such file or "
        "directory; name a program of PATH, or its path\n"
    )


@pytest.mark.parametrize(
    "change", ["", "made = ad.AnnData(made.obsm['X_emb'], obs=made.obs)"], ids=["obsm", "X"]
)
def test_the_embedding_is_kept_in_the_form_of_ours(
    change: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.h5ad"
    command = command_of(tmp_path, change)
    assert embed_external(command, corpus["cells"], out) == 0
    made = ad.read_h5ad(out)
    cells = open_cells(corpus["cells"])
    assert made.obs_names.tolist() == cells.obs_names.tolist()
    assert made.obsm["X_cellmill"].shape == (cells.n_obs, 7)
    assert made.uns["cellmill"]["command"] == command


def test_an_unchanged_model_has_the_embedding_of_stage_embed(
    corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    model = ExternalModel(model=str(corpus["model"]))
    made = tmp_path / "made.h5ad"
    own = tmp_path / "own.h5ad"
    assert model.line is not None
    assert embed_external(model.line, corpus["cells"], made) == 0
    assert (
        main(
            [
                "embed",
                "--model",
                str(corpus["model"]),
                "--input",
                str(corpus["cells"]),
                "--out",
                str(own),
            ]
        )
        == 0
    )
    np.testing.assert_array_equal(*(ad.read_h5ad(path).obsm["X_cellmill"] for path in (made, own)))
    assert ad.read_h5ad(made).uns["cellmill"]["model_digest"] == model.command_digest
    assert model.note == " (unknown: may have seen these cells)"
    assert model.read_files == [f"{corpus['model']}/model.safetensors"]
    published = ExternalModel(model="geneformer:a b")
    [weights] = published.read_files
    assert re.fullmatch(r"results/published/geneformer-a_b-\w{8}/model\.safetensors", weights)
    assert (
        published.line
        == f"cellmill embed --model {Path(weights).parent} --input {{cells}} --out {{out}}"
    )


TASKS = {
    "probe": {"seeds": 1},
    "few_shot": {"shots": [5], "draws": 2},
    "clustering": {"seeds": 1, "resolutions": [1.0]},
    "integration": {"neighbors": 15},
}


def evaluated(
    corpus: dict[str, Path], out: Path, beside: list[Path], **options: Any
) -> dict[str, Any]:
    """Evaluation, below the folder `out`, with an external model beside."""
    external = {"external": {"pca": {"command": command_of(out.parent)}}, "tasks": TASKS}
    return evaluate(corpus, out / "evaluate" / "metrics.json", beside=beside, **external | options)


@pytest.fixture
def made(corpus: dict[str, Path], tmp_path: Path) -> Path:
    """The embedding by the external model."""
    assert embed_external(command_of(tmp_path), corpus["cells"], tmp_path / "made.h5ad") == 0
    return tmp_path / "made.h5ad"


def test_an_external_model_changes_no_verdict(
    corpus: dict[str, Path], tmp_path: Path, made: Path
) -> None:
    pytest.importorskip("igraph", reason="task clustering requires igraph")
    without = evaluated(corpus, tmp_path / "a", [], external={})
    beside = evaluated(corpus, tmp_path / "b", [made])
    for task in TASKS:
        before, after = (
            metrics["datasets"]["simulated"]["tasks"][task] for metrics in (without, beside)
        )
        added = [row for row in after["rows"] if row["method"]["kind"] == "external"]
        assert [row for row in after["rows"] if row["method"]["kind"] != "external"] == before[
            "rows"
        ], task
        assert {row["method"]["features"] for row in added} == {"external: pca"}
        assert after["verdicts"] == before["verdicts"]
        against = {line["against"] for line in after["differences"]}
        assert {line["against"] for line in before["differences"]} == {
            n for n in against if "external" not in n
        }
        assert any(name.startswith("external: pca") for name in against)
    probe = beside["datasets"]["simulated"]["tasks"]["probe"]["rows"]
    best = {
        kind: max(
            row["scores"]["accuracy"]["mean"] for row in probe if row["method"]["kind"] == kind
        )
        for kind in ("model", "external")
    }
    assert best["external"] > best["model"]  # components against random weights
    run = read_run(tmp_path / "b")
    standing = list_standings([run])[0]
    assert standing.best_row.method.network == "trained"
    assert standing.baseline is not None
    assert standing.baseline.method.kind == "baseline"
    assert 'external: pca + kNN <span class="tag">external</span>' in render("Report", [run], [])
    gate = [{"task": "probe", "baseline": "external: pca"}]
    with pytest.raises(ConfigError, match="no baseline 'external: pca'; there are: untrained"):
        evaluated(corpus, tmp_path / "gate", [made], tasks={"probe": {"seeds": 1}}, gate=gate)


def test_files_of_external_models_match_their_command(
    corpus: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("igraph")  # of the extra cluster
    message = "expected 1 --external for each of 1 --cells, for evaluate.external: pca; got 0 files"
    with pytest.raises(ConfigError, match=message):
        evaluated(corpus, tmp_path / "none", [])
    other = tmp_path / "other.h5ad"
    assert embed_external(command_of(tmp_path) + " --other", corpus["cells"], other) == 0
    with pytest.raises(
        DataError, match=r"other\.h5ad: made by model \w{12}, expected \w{12}; run embed again"
    ):
        evaluated(corpus, tmp_path / "other", [other])


def run_harmony(corpus: dict[str, Path], out: Path, path: Path | None = None) -> Any:
    """Run the preset in this Python, with modules of `path` before those of installed packages."""
    folder = out.parent / "unpacked"
    folder.mkdir(parents=True, exist_ok=True)
    cells = plain_cells(corpus["cells"], folder)
    given = [f"--cells={cells}", f"--manifest={corpus['manifest']}", f"--out={out}"]
    words = [sys.executable, "-W", "ignore", str(BRIDGES / "zoo_harmony.py"), *given]
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run(words, capture_output=True, text=True, env=environment)


@pytest.fixture
def zoo_cells(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BRIDGES))
    return importlib.import_module("zoo_cells")


def test_a_preset_is_fitted_only_on_training_cells(corpus: dict[str, Path], zoo_cells: Any) -> None:
    manifest = Manifest.read(corpus["manifest"])
    mask = zoo_cells.training_cells(corpus["manifest"], "simulated", open_cells(corpus["cells"]))
    with open_counts(corpus["cells"]) as reader:
        unseen, _ = HeldOutCheck([manifest], ["simulated"]).find_held_out("simulated", reader)
    assert unseen.any()
    assert manifest.splits["val"].n_obs
    assert not (mask & unseen).any()
    assert mask.sum() == manifest.splits["train"].n_obs
    assert (~mask & ~unseen).sum() == manifest.splits["val"].n_obs


def test_cells_of_another_dataset_have_no_training_cells(
    corpus: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("harmonypy", reason="preset harmony requires harmonypy")
    other = tmp_path / "other.h5ad"
    other.symlink_to(corpus["cells"])
    done = run_harmony(corpus | {"cells": other}, tmp_path / "out.h5ad")
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        f"cellmill: other: preset harmony: expected training cells, got none in {corpus['manifest']}; lower "
        "shard.test_frac\n",
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "raise ValueError('of two\\nlines')",
            "harmonypy VERSION failed: ValueError: of two lines",
        ),
        (
            "return type('', (), {'Z_corr': given * float('nan')})",
            "expected finite numbers from harmonypy VERSION",
        ),
    ],
)
def test_a_failed_command_writes_no_file(
    fault: str, message: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    version = pytest.importorskip(
        "harmonypy", reason="preset harmony requires harmonypy"
    ).__version__
    (tmp_path / "harmonypy").mkdir()
    text = f"def run_harmony(given, *args, **options):\n    {fault}"
    (tmp_path / "harmonypy" / "__init__.py").write_text(text)
    done = run_harmony(corpus, tmp_path / "made" / "out.h5ad", tmp_path)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith(
        f"cellmill: simulated: preset harmony: {message.replace('VERSION', version)}"
    )
    assert not (tmp_path / "made" / "out.h5ad").exists()


def test_harmony_corrects_components_of_training_cells(
    corpus: dict[str, Path], tmp_path: Path, zoo_cells: Any
) -> None:
    harmonypy = pytest.importorskip("harmonypy", reason="preset harmony requires harmonypy")
    out = tmp_path / "harmony.h5ad"
    done = run_harmony(corpus, out)
    assert (done.returncode, done.stderr) == (0, "")
    cells = open_cells(corpus["cells"])
    made = ad.read_h5ad(out)
    train = zoo_cells.training_cells(corpus["manifest"], "simulated", cells)
    assert done.stdout.startswith(
        f"simulated: preset harmony: harmonypy {harmonypy.__version__}, fitted on {train.sum()} training cells, "
    )
    profiles = log_normalise(cells.X)
    fitted = pca(profiles[train].shape).fit(profiles[train])
    frame = pd.DataFrame({"batch": cells.obs["batch"].astype(str).to_numpy()})
    assert frame["batch"].nunique() == 2
    expected = harmonypy.run_harmony(
        fitted.transform(profiles), frame, "batch", verbose=False, random_state=0
    )
    np.testing.assert_allclose(made.obsm["X_cellmill"], np.asarray(expected.Z_corr), atol=1e-2)
    assert made.obs_names.tolist() == cells.obs_names.tolist()

    run = tmp_path / "run"
    tasks = {"probe": {"seeds": 1}, "integration": {"neighbors": 15}}
    options = {"tasks": tasks, "external": {"mixed": {"preset": "harmony"}}}
    metrics = evaluate(corpus, run / "evaluate" / "metrics.json", beside=[out], **options)
    for task in tasks:
        rows = metrics["datasets"]["simulated"]["tasks"][task]["rows"]
        names = {row["method"]["features"] for row in rows if row["method"]["kind"] == "external"}
        assert names == {"external: mixed (transductive)"}
    assert 'external: mixed (transductive) + kNN <span class="tag">external</span>' in render(
        "", [read_run(run)], []
    )
    options["external"] = {"mixed": {"preset": "scvi"}}
    with pytest.raises(DataError, match="made by model harmony, expected scvi"):
        evaluate(corpus, tmp_path / "other.json", beside=[out], **options)


@pytest.mark.parametrize(
    ("preset", "datasets", "message"),
    [
        (
            "harmony",
            "[a]",
            "preset harmony corrects batches; name those of a in column batch of table.tsv",
        ),
        ("scvi", "[b]", "preset scvi is fitted on training cells; add b to corpora.one.datasets"),
    ],
)
def test_a_preset_without_its_batches_is_refused_before_a_run(
    preset: str, datasets: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.tsv").write_text("dataset\tpath\tbatch\na\ta.h5ad\t\nb\tb.h5ad\tdonor\n")
    Path("config.yaml").write_text(
        f"corpora: {{one: {{table: table.tsv, datasets: [a]}}}}\ntrain: {{steps: 1}}\nruns: {{r: {{corpus: one}}}}\n"
        f"evaluate: {{datasets: {datasets}, external: {{x: {{preset: {preset}}}}}}}\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_config(Path("config.yaml"))
    assert str(raised.value) == f"config.yaml: runs.r.evaluate.external.x: {message}"
