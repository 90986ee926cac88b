"""Presets of external models: the cells that they are fitted on, the file that they write, and what goes wrong."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellmill.config import load_config
from cellmill.data.arrays import log_normalise
from cellmill.data.inputs.formats import open_counts
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.task import TrainedCells, pca
from cellmill.report.collect import read_run
from cellmill.report.page import render
from tests.unit.evaluated import evaluate

FOLDER = Path(__file__).resolve().parents[2] / "workflow" / "bridges"
PACKAGES = {"scvi": ("scvi-tools", "scvi", "1.4.2"), "harmony": ("harmonypy", "harmonypy", "2.1.0")}


def run_preset(preset: str, corpus: dict[str, Path], out: Path, path: Path | None = None) -> Any:
    """Run a preset in this Python, with modules of `path` before those of installed packages."""
    given = [f"--cells={corpus['cells']}", f"--manifest={corpus['manifest']}", f"--out={out}"]
    words = [sys.executable, "-W", "ignore", str(FOLDER / f"zoo_{preset}.py"), *given]
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run(words, capture_output=True, text=True, env=environment)


def fake(folder: Path, module: str, text: str) -> Path:
    """A folder with a package that has a fault."""
    (folder / module).mkdir()
    (folder / module / "__init__.py").write_text(text)
    return folder


@pytest.fixture
def zoo_cells(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("zoo_cells")


def test_a_preset_is_fitted_on_training_cells_and_on_no_held_out_or_validation_cell(
    corpus: dict[str, Path], zoo_cells: Any
) -> None:
    manifest = Manifest.read(corpus["manifest"])
    mask = zoo_cells.training_cells(corpus["manifest"], "simulated", ad.read_h5ad(corpus["cells"]))
    with open_counts(corpus["cells"]) as reader:
        unseen, _ = TrainedCells([manifest], ["simulated"]).unseen("simulated", reader)
    assert unseen.any()
    assert manifest.splits["val"].n_obs
    assert not (mask & unseen).any()
    assert mask.sum() == manifest.splits["train"].n_obs
    assert (~mask & ~unseen).sum() == manifest.splits["val"].n_obs


def test_cells_of_another_dataset_have_no_training_cells(corpus: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("harmonypy", reason="preset harmony requires harmonypy")
    other = tmp_path / "other.h5ad"
    other.symlink_to(corpus["cells"])
    done = run_preset("harmony", corpus | {"cells": other}, tmp_path / "out.h5ad")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"cellmill: other: preset harmony: expected training cells, got none in {corpus['manifest']}; lower "
        "shard.test_frac\n"
    )


@pytest.mark.parametrize("preset", PACKAGES)
def test_without_its_package_a_preset_says_so_in_one_line(preset: str, corpus: dict[str, Path], tmp_path: Path) -> None:
    package, module, tested = PACKAGES[preset]
    path = fake(tmp_path, module, f"raise ModuleNotFoundError('No module named {module}')")
    done = run_preset(preset, corpus, tmp_path / "out.h5ad", path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"cellmill: {package} cannot be imported by {sys.executable} (No module named {module}); install {package} "
        f"(tested: {tested}) in an environment of its own and set bridges: {{{preset}: PATH_OF_ITS_PYTHON}}, or run "
        "snakemake with --sdm conda\n"
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise ValueError('of two\\nlines')", "harmonypy VERSION failed: ValueError: of two lines"),
        ("return type('', (), {'Z_corr': given * float('nan')})", "expected finite numbers from harmonypy VERSION"),
    ],
)
def test_the_last_line_says_what_is_wrong_and_no_file_is_written(
    fault: str, message: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    version = pytest.importorskip("harmonypy", reason="preset harmony requires harmonypy").__version__
    path = fake(tmp_path, "harmonypy", f"def run_harmony(given, *args, **options):\n    {fault}")
    done = run_preset("harmony", corpus, tmp_path / "made" / "out.h5ad", path)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"cellmill: simulated: preset harmony: {message.replace('VERSION', version)}")
    assert not (tmp_path / "made").exists()


def test_harmony_corrects_components_of_training_cells_and_is_a_row_that_says_so(
    corpus: dict[str, Path], tmp_path: Path, zoo_cells: Any
) -> None:
    harmonypy = pytest.importorskip("harmonypy", reason="preset harmony requires harmonypy")
    out = tmp_path / "harmony.h5ad"
    done = run_preset("harmony", corpus, out)
    assert (done.returncode, done.stderr) == (0, "")
    cells, made = ad.read_h5ad(corpus["cells"]), ad.read_h5ad(out)
    train = zoo_cells.training_cells(corpus["manifest"], "simulated", cells)
    assert done.stdout.startswith(
        f"simulated: preset harmony: harmonypy {harmonypy.__version__}, fitted on {train.sum()} training cells, "
    )
    profiles = log_normalise(cells.X)
    fitted = pca(profiles[train].shape).fit(profiles[train])
    frame = pd.DataFrame({"batch": cells.obs["batch"].astype(str).to_numpy()})
    assert frame["batch"].nunique() == 2
    expected = harmonypy.run_harmony(fitted.transform(profiles), frame, "batch", verbose=False, random_state=0)
    np.testing.assert_allclose(made.obsm["X_cellmill"], np.asarray(expected.Z_corr), atol=1e-2)
    assert made.obs_names.tolist() == cells.obs_names.tolist()

    run = tmp_path / "run"
    tasks = {"probe": {"seeds": 1}, "integration": {"neighbors": 15}}
    options = {"tasks": tasks, "external": {"mixed": {"preset": "harmony"}}}
    metrics = evaluate(corpus, run / "evaluate" / "metrics.json", beside=[out], **options)
    for task in tasks:
        rows = metrics["datasets"]["simulated"]["tasks"][task]["rows"]
        names = {row["name"].partition(" + ")[0] for row in rows if row["kind"] == "external"}
        assert names == {"external: mixed (transductive)"}
    assert 'external: mixed (transductive) + kNN <span class="tag">external</span>' in render("", [read_run(run)], [])
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
def test_a_preset_without_the_cells_or_batches_that_it_reads_is_refused_before_a_run(
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
