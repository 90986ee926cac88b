"""A model in Python gives the vectors and labels that the commands write, whatever the batch and order of the cells."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import cellmill
from cellmill.cli import main
from cellmill.config.options import PredictOptions
from cellmill.errors import ConfigError, DataError
from cellmill.stages import cells as predict
from tests.unit.evaluated import embed, with_config
from tests.unit.exported import export_model


@pytest.fixture(scope="module")
def raw(simulated: Path) -> ad.AnnData:
    return ad.read_h5ad(simulated)


@pytest.fixture
def folder(corpus: dict[str, Path]) -> Path:
    return corpus["model"]


def test_vectors_are_those_of_the_command_in_any_batch_and_order(
    tmp_path: Path, simulated: Path, raw: ad.AnnData, folder: Path
) -> None:
    expected = np.asarray(ad.read_h5ad(embed(folder, simulated, tmp_path / "out.h5ad")).obsm["X_cellmill"])
    model = cellmill.load(str(folder))
    assert (model.embed(raw) == expected).all()
    order = np.random.default_rng(0).permutation(raw.n_obs)
    for some in (order, order[:1], order[3:10]):
        assert np.abs(model.embed(raw[some]) - expected[some]).max() < 5e-6  # a view, not a copy
    assert np.abs(model.embed(raw, token_budget=100) - expected).max() < 5e-6


def test_every_kind_of_matrix_gives_the_same_vectors(raw: ad.AnnData, folder: Path) -> None:
    model, some = cellmill.load(folder), raw[:40].copy()
    expected = model.embed(some)
    dense = np.asarray(some.X.todense())
    log = np.log1p(dense)
    for matrix in (dense, np.asfortranarray(dense), sp.csc_matrix(dense), sp.coo_array(dense).tocsr()):
        assert (model.embed(ad.AnnData(matrix, var=some.var)) == expected).all()
    normalised = ad.AnnData(log, var=some.var, layers={"counts": dense})
    assert (model.embed(normalised, "counts") == expected).all()
    normalised.raw = ad.AnnData(dense, var=some.var)
    narrow = normalised[:, :50]
    assert (model.embed(narrow, "raw") == expected).all()  # raw has genes of its own
    with pytest.raises(DataError, match=r"looks log-transformed; raw counts may be in raw or counts: set argument"):
        model.embed(normalised)
    with pytest.raises(DataError, match=r"^adata: no matrix 'count' \(argument `counts`\); did you mean 'counts'"):
        model.embed(normalised, "count")


def test_a_backed_adata_is_named_and_genes_of_one_name_are_summed_as_in_a_file(
    tmp_path: Path, simulated: Path, raw: ad.AnnData, folder: Path
) -> None:
    model = cellmill.load(folder)
    backed = ad.read_h5ad(simulated, backed="r")
    with pytest.raises(DataError, match=r"simulated\.h5ad; pass adata\.to_memory\(\), or embed the file"):
        model.embed(backed)
    backed.file.close()
    twice = raw[:3].copy()
    twice.var_names = [*raw.var_names[:-1], raw.var_names[0]]
    twice.write_h5ad(tmp_path / "twice.h5ad")
    embedded = ad.read_h5ad(embed(folder, tmp_path / "twice.h5ad", tmp_path / "out.h5ad"))
    assert (model.embed(twice) == np.asarray(embedded.obsm["X_cellmill"])).all()
    few = raw[:3, :20].copy()
    with pytest.warns(UserWarning, match=r"^adata: it measures 20 of the model's"):
        model.embed(few, min_coverage_frac=0)
    with pytest.raises(DataError, match=r"embed\.min_expressed_frac is 0\.9"):
        model.embed(few, min_coverage_frac=0, min_expressed_frac=0.9)
    with pytest.raises(ConfigError, match="it predicts no labels"):
        model.predict(raw)


def test_labels_are_those_of_the_command(
    tmp_path: Path, simulated: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells, levels = simulated, {"cell_type": ("a", "b", "c", "<missing>")}
    classify: dict[str, Any] = {"objective": "classification", "label_column": "cell_type", "levels": levels}
    folder = export_model(tmp_path / "model", folder / "vocabulary.tsv", seed=1, **classify)
    with_config(folder, classifier={"label_column": "cell_type", "labels": ["a", "b", "c"], "calibration": None})
    arguments = ["predict", "--model", str(folder), "--input", str(cells), "--out", str(tmp_path / "by_hand.h5ad")]
    model = cellmill.load(folder)
    given: dict[str, Any] = {"min_probability": 0.45}
    for flags, options in (([], {}), (["--min-probability", "0.45"], given)):  # the same default, the same threshold
        assert main([*arguments, *flags]) == 0
        by_hand = ad.read_h5ad(tmp_path / "by_hand.h5ad").obs["cellmill_label"]
        assert list(model.predict(ad.read_h5ad(cells), **options).labels) == list(by_hand)
    assert 0 < (by_hand == "unknown").sum() < len(by_hand)
    few = ad.read_h5ad(cells)[:9, :20].copy()
    few.write_h5ad(tmp_path / "few.h5ad")
    arguments[4] = str(tmp_path / "few.h5ad")
    for stage in ("embed", "predict"):
        assert main([stage, *arguments[1:], "--min-expressed-frac", "0.9"]) == 2
        assert "embed.min_expressed_frac is 0.9; " in capsys.readouterr().err
    assert main([*arguments, "--min-coverage-frac", "2"]) == 2
    assert capsys.readouterr().err == (
        "cellmill predict: the command: embed.min_coverage_frac: input should be less than or equal to 1, got '2'\n"
    )
    assert main([*arguments, "--min-coverage-frac", "0"]) == 0
    assert "few: warning: it measures 20 of the model's" in capsys.readouterr().out
    with pytest.warns(UserWarning, match=r"^adata: it measures 20 of the model's"):
        model.predict(few, min_coverage_frac=0)


def test_predictions_of_all_heads_are_those_of_the_command(tmp_path: Path, simulated: Path, folder: Path) -> None:
    levels = {"cell_type": ("a", "b", "c", "<missing>"), "tissue": ("lung", "skin")}
    parts: dict[str, Any] = {name: {"name": "classification", "label_column": name} for name in levels}
    numbers = {"age": {"name": "regression", "target_column": "age", "target_mean": 40.0, "target_std": 12.0}}
    entries = {name: {"label_column": name, "labels": [*levels[name][:3]], "calibration": None} for name in levels}
    about = {"temperature": 0.5, "calibration_error": 0.1, "n_cells": 9, "accuracy_above": [0.5], "labelled_above": [1]}
    entries["tissue"]["calibration"] = about
    heads = {"classifier": entries["cell_type"], "more_classifiers": {"tissue": entries["tissue"]}}
    for name, given, written in (("all", parts | numbers, heads), ("numbers", numbers, {})):
        objective: dict[str, Any] = {"objective": "sum", "parts": given, "levels": levels}
        model = with_config(export_model(tmp_path / name, folder / "vocabulary.tsv", seed=1, **objective), **written)
        options = PredictOptions.model_validate({"embed": {}, "predict": {"min_probability": 0.4}})
        predict.predict(options=options, model=model, input=simulated, counts="X", out=tmp_path / "out.h5ad")
        expected, adata = ad.read_h5ad(tmp_path / "out.h5ad"), ad.read_h5ad(simulated)
        made = cellmill.load(model).predict(adata, min_probability=0.4)
        made.add_to(adata)
        adata.write_h5ad(tmp_path / "added.h5ad")
        added = ad.read_h5ad(tmp_path / "added.h5ad")
        pd.testing.assert_frame_equal(added.obs[expected.obs.columns], expected.obs)
        assert added.obsm.keys() >= expected.obsm.keys()
        assert all((added.obsm[key] == table).all() for key, table in expected.obsm.items())
        assert repr(added.uns["cellmill_prediction"]) == repr(expected.uns["cellmill_prediction"])
        if name == "all":
            assert {"cellmill_label", "cellmill_label_tissue", "cellmill_value"} <= {*made.obs}
            assert list(made.labels) == list(expected.obs["cellmill_label"])
            assert made.obs["cellmill_label_tissue"].categories.tolist() == ["lung", "skin", "unknown"]
    assert {"cellmill_value"} == {*made.obs}
    with pytest.raises(ConfigError, match=r"^the model predicts no labels; its numbers are in obs: cellmill_value$"):
        _ = made.labels


def test_importing_the_package_loads_neither_torch_nor_numpy() -> None:
    code = "import cellmill, sys; print(cellmill.load.__name__, {'torch', 'numpy', 'anndata'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "load set()\n"


def test_the_folder_of_a_run_is_not_its_model(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(folder)
    with pytest.raises(DataError, match=rf"run: this is the folder of a run; its model is {tmp_path}/run/model$"):
        cellmill.load(tmp_path / "run")
