"""A model in Python gives the vectors and labels that the commands write; labels that it does not
know are named.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

import cellmill
from cellmill import open_cells
from cellmill.cli import main
from cellmill.config.options import PredictOptions
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.inference.label_counts import MAX_NAMES, count_labels
from cellmill.models.objectives.shared.calibration import expected_calibration_error
from cellmill.report.collect import read_run
from cellmill.report.page import render
from cellmill.stages import cells as predict
from tests.unit.evaluated import embed, evaluate, export_classifier, with_config
from tests.unit.exported import export_model


@pytest.fixture(scope="module")
def raw(simulated: Path) -> ad.AnnData:
    return ad.read_h5ad(simulated)


@pytest.fixture
def folder(corpus: dict[str, Path]) -> Path:
    return corpus["model"]


def test_vectors_equal_those_of_the_command(
    tmp_path: Path, simulated: Path, raw: ad.AnnData, folder: Path
) -> None:
    expected = np.asarray(
        ad.read_h5ad(embed(folder, simulated, tmp_path / "out.h5ad")).obsm["X_cellmill"]
    )
    model = cellmill.load(str(folder))
    assert (model.embed(raw) == expected).all()
    order = np.random.default_rng(0).permutation(raw.n_obs)
    for some in (order, order[:1], order[3:10]):
        assert np.abs(model.embed(raw[some]) - expected[some]).max() < 5e-6  # a view, not a copy
    assert np.abs(model.embed(raw, token_budget=100) - expected).max() < 5e-6


def test_every_kind_of_matrix_gives_the_same_vectors(raw: ad.AnnData, folder: Path) -> None:
    model = cellmill.load(folder)
    some = raw[:40].copy()
    expected = model.embed(some)
    dense = np.asarray(some.X.todense())
    log = np.log1p(dense)
    for matrix in (
        dense,
        np.asfortranarray(dense),
        sp.csc_matrix(dense),
        sp.coo_array(dense).tocsr(),
    ):
        assert (model.embed(ad.AnnData(matrix, var=some.var)) == expected).all()
    normalised = ad.AnnData(log, var=some.var, layers={"counts": dense})
    assert (model.embed(normalised, "counts") == expected).all()
    normalised.raw = ad.AnnData(dense, var=some.var)
    narrow = normalised[:, :50]
    assert (model.embed(narrow, "raw") == expected).all()  # raw has genes of its own
    with pytest.raises(
        DataError, match=r"looks log-transformed; raw counts may be in raw or counts: set argument"
    ):
        model.embed(normalised)
    with pytest.raises(
        DataError, match=r"^adata: no matrix 'count' \(argument `counts`\); did you mean 'counts'"
    ):
        model.embed(normalised, "count")


def test_duplicate_genes_are_summed_as_in_a_file(
    tmp_path: Path, simulated: Path, raw: ad.AnnData, folder: Path
) -> None:
    model = cellmill.load(folder)
    backed = ad.read_h5ad(simulated, backed="r")
    with pytest.raises(
        DataError, match=r"simulated\.h5ad; pass adata\.to_memory\(\), or embed the file"
    ):
        model.embed(backed)
    backed.file.close()
    twice = raw[:3].copy()
    twice.var_names = [*raw.var_names[:-1], raw.var_names[0]]
    twice.write_h5ad(tmp_path / "twice.h5ad")
    embedded = ad.read_h5ad(embed(folder, tmp_path / "twice.h5ad", tmp_path / "out.h5ad"))
    assert (model.embed(twice) == np.asarray(embedded.obsm["X_cellmill"])).all()
    with pytest.raises(ConfigError, match="it predicts neither labels nor numbers"):
        model.predict(raw)


def test_labels_equal_those_of_the_command(
    tmp_path: Path, simulated: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = export_classifier(
        tmp_path / "model", folder / "vocabulary.tsv", "cell_type", ["a", "b", "c"]
    )
    few = ad.read_h5ad(simulated)[:9, :20].copy()
    out = tmp_path / "out.h5ad"
    model = cellmill.load(folder)
    few.write_h5ad(tmp_path / "few.h5ad")

    def run(stage: str, cells: Path, *flags: str) -> str:
        """What the command prints, or its error."""
        code = main(
            [stage, "--model", str(folder), "--input", str(cells), "--out", str(out), *flags]
        )
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    for flags, options in (([], {}), (["--min-probability", "0.45"], {"min_probability": 0.45})):
        run("predict", simulated, *flags)
        labels = model.predict(ad.read_h5ad(simulated), **options).labels
        written = ad.read_h5ad(out)
        assert list(labels.astype(str)) == list(written.obs["cellmill_label"].astype(str))
    assert 0 < labels.isna().sum() < len(labels)
    for stage in ("embed", "predict"):
        assert "embed.min_expressed_frac is 0.9; " in run(
            stage, tmp_path / "few.h5ad", "--min-expressed-frac", "0.9"
        )
    assert run("predict", tmp_path / "few.h5ad", "--min-coverage-frac", "2") == (
        "cellmill predict: the command: embed.min_coverage_frac: input should be less than or equal to 1, got '2'\n"
    )
    printed = run("predict", tmp_path / "few.h5ad", "--min-coverage-frac", "0")
    assert "few: warning: it measures 20 of the model's" in printed
    with pytest.warns(UserWarning, match=r"^adata: it measures 20 of the model's"):
        model.predict(few, min_coverage_frac=0)


def test_predictions_of_all_heads_equal_the_command(
    tmp_path: Path, simulated: Path, folder: Path
) -> None:
    levels = {"cell_type": ("a", "b", "c", "<missing>"), "tissue": ("lung", "skin")}
    parts: dict[str, Any] = {
        name: {"name": "classification", "label_column": name} for name in levels
    }
    numbers = {
        "age": {
            "name": "regression",
            "target_column": "age",
            "target_mean": 40.0,
            "target_std": 12.0,
        }
    }
    entries = {
        name: {"label_column": name, "labels": [*levels[name][:3]], "calibration": None}
        for name in levels
    }
    about = {
        "temperature": 0.5,
        "calibration_error": 0.1,
        "n_cells": 9,
        "accuracy_above": [0.5],
        "labelled_above": [1],
    }
    entries["tissue"]["calibration"] = about
    heads = {"classifier": entries["cell_type"], "more_classifiers": {"tissue": entries["tissue"]}}
    for name, given, written, thresholds in (
        ("all", parts | numbers, heads, {"min_probability": 0.4}),
        ("numbers", numbers, {}, {}),
    ):
        objective: dict[str, Any] = {"objective": "sum", "parts": given, "levels": levels}
        model = with_config(
            export_model(tmp_path / name, folder / "vocabulary.tsv", seed=1, **objective), **written
        )
        options = PredictOptions.model_validate({"embed": {}, "predict": thresholds})
        predict.predict(
            options=options, model=model, input=simulated, counts="X", out=tmp_path / "out.h5ad"
        )
        expected = ad.read_h5ad(tmp_path / "out.h5ad")
        adata = ad.read_h5ad(simulated)
        made = cellmill.load(model).predict(adata, **thresholds)
        made.add_to(adata)
        adata.write_h5ad(tmp_path / "added.h5ad")
        added = ad.read_h5ad(tmp_path / "added.h5ad")
        pd.testing.assert_frame_equal(added.obs[expected.obs.columns], expected.obs)
        assert added.obsm.keys() >= expected.obsm.keys()
        assert all((added.obsm[key] == table).all() for key, table in expected.obsm.items())
        assert repr(added.uns["cellmill_prediction"]) == repr(expected.uns["cellmill_prediction"])
        if name == "all":
            assert {"cellmill_label", "cellmill_label_tissue", "cellmill_value"} <= {*made.obs}
            assert list(made.labels.astype(str)) == list(expected.obs["cellmill_label"].astype(str))
            assert made.obs["cellmill_label_tissue"].categories.tolist() == ["lung", "skin"]
            assert made.about["n_calibration_cells_tissue"] == 9
    assert {"cellmill_value"} == {*made.obs}
    made.obs["cellmill_seen_in_training"] = np.zeros(len(made.obs["cellmill_value"]), bool)
    with pytest.raises(
        ConfigError, match=r"^the model predicts no labels; its numbers are in obs: cellmill_value$"
    ):
        _ = made.labels


def test_importing_the_package_loads_neither_torch_nor_numpy() -> None:
    code = "import cellmill, sys; print(cellmill.load.__name__, {'torch', 'numpy', 'anndata'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "load set()\n"


def test_the_folder_of_a_run_is_not_its_model(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(folder)
    with pytest.raises(
        DataError, match=rf"run: this is the folder of a run; its model is {tmp_path}/run/model$"
    ):
        cellmill.load(tmp_path / "run")


LABELS = ["T cell", "B cell"]


def _cells(folder: Path, corpus: dict[str, Path], kinds: list[Any]) -> Path:
    """The cells with `kinds` in turn in obs column `kind`; without the column if there are none."""
    adata = open_cells(corpus["cells"])
    if kinds:
        adata.obs["kind"] = pd.Categorical([kinds[i % len(kinds)] for i in range(adata.n_obs)])
    adata.write_h5ad(folder / "cells.h5ad")
    return folder / "cells.h5ad"


def _reconstruct(corpus: dict[str, Path], folder: Path, model: Path, cells: Path) -> dict[str, Any]:
    embedding = embed(model, cells, folder / "embedding" / "cells.h5ad")
    files = {**corpus, "model": model, "cells": cells, "embedding": embedding}
    out = folder / "run" / "evaluate"
    metrics = evaluate(files, out / "metrics.json", "-", tasks={"reconstruct": {}}, cells="all")
    result: dict[str, Any] = metrics["datasets"]["cells"]["tasks"]["reconstruct"]
    return result


def test_calibration_is_measured_at_the_exported_temperature(
    tmp_path: Path, corpus: dict[str, Path]
) -> None:
    calibration = {"temperature": 0.25, "accuracy_above": [], "labelled_above": []}
    model = export_classifier(
        tmp_path / "model", corpus["vocabulary"], "kind", LABELS, calibration=calibration
    )
    cells = _cells(tmp_path, corpus, LABELS)
    figures = _reconstruct(corpus, tmp_path, model, cells)["figures"]
    predicted = cellmill.load(model).predict(ad.read_h5ad(cells))
    right = np.asarray(predicted.labels, object) == ad.read_h5ad(cells).obs["kind"].to_numpy(object)
    expected = expected_calibration_error(
        predicted.obs["cellmill_probability"].astype(np.float64), right.astype(np.float64)
    )
    assert figures["calibration_error"] == pytest.approx(expected, abs=1e-5)
    assert figures["temperature"] == 0.25
    # random weights, made surer
    assert figures["calibration_error_uncalibrated"] < figures["calibration_error"]


def test_evaluation_names_labels_that_the_model_does_not_know(
    tmp_path: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cells = _cells(tmp_path, corpus, ["T cell", "HSC", "HSC", None, "B cell", "Mast"])
    n = {kind: int(count) for kind, count in ad.read_h5ad(cells).obs["kind"].value_counts().items()}
    model = export_classifier(tmp_path / "model", corpus["vocabulary"], "kind", LABELS)
    result = _reconstruct(corpus, tmp_path, model, cells)
    assert "\ncells: 100.0% of counts on known genes\n" in capsys.readouterr().out
    assert result["figures"]["n_targets"] == n["T cell"] + n["B cell"]
    assert result["figures"]["unknown_labels"] == {"HSC": n["HSC"], "Mast": n["Mast"]}
    assert result["figures"]["n_cells_of_unknown_labels"] == n["HSC"] + n["Mast"]
    sentence = (
        f"classification of kind: {n['HSC'] + n['Mast']} of {sum(n.values())} labelled cells have a label that the "
        f"model does not know: 'HSC' {n['HSC']}, 'Mast' {n['Mast']}; such cells are not judged."
    )
    assert result["sentences"][-1] == sentence
    assert len(result["sentences"]) == 2
    assert sentence.replace("'", "&#39;") in render("x", [read_run(tmp_path / "run")], [])


@pytest.mark.parametrize(
    ("kinds", "problem"),
    [
        (
            ["t", "b"],
            "none of 600 labelled cells has a label that the model knows: expected T cell, B cell; "
            "got 'b' 300, 't' 300",
        ),
        ([None], "no cell has a label"),
        ([], "the file has no such obs column"),
    ],
)
def test_an_evaluation_without_judged_cells_is_reported(
    tmp_path: Path, corpus: dict[str, Path], kinds: list[Any], problem: str
) -> None:
    parts = {"kind": {"name": "classification", "label_column": "kind"}}
    model = export_model(
        tmp_path / "model",
        corpus["vocabulary"],
        levels={"kind": (*LABELS, "<missing>")},
        objective="sum",
        parts=parts,
    )
    with_config(model, classifier={"label_column": "kind", "labels": LABELS, "calibration": None})
    result = _reconstruct(corpus, tmp_path, model, _cells(tmp_path, corpus, kinds))
    assert result["figures"]["kind.n_targets"] == 0
    assert ("kind.unknown_labels" in result["figures"]) == (kinds == ["t", "b"])
    assert result["sentences"] == [f"classification of kind: {problem}; no cell is judged."]


@pytest.mark.parametrize("objective", ["regression", "perturbation_response"])
def test_an_objective_without_targets_gets_no_verdict(
    tmp_path: Path, corpus: dict[str, Path], objective: str
) -> None:
    options = {
        "regression": {"target_column": "age", "target_mean": 40.0, "target_std": 9.0},
        "perturbation_response": {"perturbation_column": "kind", "control": "T cell"},
    }
    model = export_model(
        tmp_path / "model",
        corpus["vocabulary"],
        levels={"kind": (*LABELS, "<missing>")},
        family="profile",
        heads=None,
        objective=objective,
        **options[objective],
    )
    result = _reconstruct(corpus, tmp_path, model, _cells(tmp_path, corpus, ["t", "b"]))
    assert result["figures"]["n_targets"] == 0
    assert result["verdicts"] == []
    unknown = {"b": 300, "t": 300} if objective == "perturbation_response" else None
    assert result["figures"].get("unknown_labels") == unknown


@pytest.mark.parametrize("smallest", [None, 0.6])
def test_prediction_reports_how_many_cells_agree(
    tmp_path: Path,
    corpus: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    smallest: float | None,
) -> None:
    model = export_classifier(tmp_path / "model", corpus["vocabulary"], "kind", LABELS)
    cells = _cells(tmp_path, corpus, ["T cell", "HSC", None, "B cell"])
    options = PredictOptions.model_validate({"embed": {}, "predict": {"min_probability": smallest}})
    predict.predict(
        options=options, model=model, input=cells, counts="X", out=tmp_path / "out.h5ad"
    )
    obs = ad.read_h5ad(tmp_path / "out.h5ad").obs
    known = obs["kind"].isin(LABELS)
    n_other = (obs["kind"] == "HSC").sum()
    equal = int((obs["kind"].astype(str) == obs["cellmill_label"].astype(str))[known].sum())
    lines = capsys.readouterr().out.splitlines()
    assert "cells: 100.0% of counts on known genes" in lines
    counted = obs["cellmill_label"].value_counts()
    most = ", ".join(f"{label} {n:,}" for label, n in counted[counted > 0].items())
    assert [line for line in lines if f"; most as {most} -> " in line]
    n_rejected = int(obs["cellmill_label"].isna()[known].sum())
    assert bool(n_rejected) == bool(smallest)
    rejected = f", {n_rejected} without a predicted label" if n_rejected else ""
    agree = f"cells: kind: {equal} of {known.sum()} ({equal / known.sum():.3f}{rejected}) as in the file; no accuracy, "
    assert [line for line in lines if line.startswith(agree)]
    assert (
        f"cells: warning: obs column kind: {n_other} of {known.sum() + n_other} labelled cells have a label that the "
        f"model does not know: 'HSC' {n_other}"
    ) in lines


def test_labels_are_the_same_text_as_in_the_shards() -> None:
    kinds = np.repeat(np.arange(30.0), np.arange(1, 31))
    obs = pd.DataFrame({"kind": [*kinds, np.nan]}, index=[str(i) for i in range(len(kinds) + 1)])
    counts = count_labels(obs, "one", "kind", ["29"])
    line = counts.problem
    assert line is not None
    assert line.startswith(
        "kind: 435 of 465 labelled cells have a label that the model does not know: '28' 29, '27' 28,"
    )
    assert line.endswith("'9' 10 and 9 more")
    assert list(counts.figures()["unknown_labels"]) == [
        str(i) for i in range(28, 28 - MAX_NAMES, -1)
    ]
    assert count_labels(obs, "one", "dataset", ["two"]).unknown == {"one": 466}


EXAMPLE = Path(__file__).resolve().parents[2] / "config" / "examples" / "in-scanpy.py"


def test_the_scanpy_example_stores_vectors_and_labels(
    simulated: Path, corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scanpy", reason="the package scanpy is not installed")
    monkeypatch.chdir(tmp_path)
    cells = tmp_path / "data" / "demo" / "pbmc68k.h5ad"
    runs = tmp_path / "results" / "runs"
    for path in (cells, runs / "demo" / "model"):
        path.parent.mkdir(parents=True)
    cells.symlink_to(simulated)
    (runs / "demo" / "model").symlink_to(corpus["model"])
    genes = corpus["model"] / "vocabulary.tsv"
    export_classifier(runs / "annotator" / "model", genes, "cell_type", ["a", "b", "c"])
    threads = torch.get_num_threads()
    exec(compile(EXAMPLE.read_text(encoding="utf-8"), EXAMPLE.name, "exec"), {})
    made = ad.read_h5ad("analysed.h5ad")
    before = ad.read_h5ad(simulated)
    np.testing.assert_array_equal(made.X.toarray(), before.X.toarray())
    # numba, in UMAP, has set all cores, with which sums may end in another bit
    torch.set_num_threads(threads)
    assert (
        main(
            [
                "embed",
                "--model",
                str(corpus["model"]),
                "--input",
                str(simulated),
                "--out",
                "embedded.h5ad",
            ]
        )
        == 0
    )
    embedded = ad.read_h5ad("embedded.h5ad")
    np.testing.assert_array_equal(made.obsm["X_cellmill"], embedded.obsm["X_cellmill"])
    assert made.uns["cellmill"]["model_digest"] == embedded.uns["cellmill"]["model_digest"]
    assert made.uns["neighbors"]["params"]["use_rep"] == "X_cellmill"
    assert made.obsp["connectivities"].shape == (made.n_obs, made.n_obs)
    assert made.obsm["X_umap"].shape == (made.n_obs, 2)
    probabilities = made.obsm["cellmill_probabilities"]
    best = np.array(made.uns["cellmill_prediction"]["labels"])[probabilities.argmax(1)]
    rejected = probabilities.max(1) < 0.5
    np.testing.assert_array_equal(made.obs["cellmill_rejected"], rejected)
    np.testing.assert_array_equal(made.obs["cellmill_label"].isna(), rejected)
    np.testing.assert_array_equal(made.obs["cellmill_label"][~rejected], best[~rejected])
    assert 0 < rejected.sum() < len(rejected)
