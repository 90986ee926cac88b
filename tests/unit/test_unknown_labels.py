"""Labels that a model does not know are named, in evaluation and prediction, and never taken for another."""

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import cellmill
from cellmill.config.options import PredictOptions
from cellmill.evaluate.predict import MOST_NAMES, calibration_error, count_labels
from cellmill.report.collect import read_run
from cellmill.report.page import render
from cellmill.stages import cells as predict
from tests.unit.evaluated import embed, evaluate, with_config
from tests.unit.exported import export_model

LABELS = ["T cell", "B cell"]


def _model(folder: Path, corpus: dict[str, Path], **objective: Any) -> Path:
    levels = {"kind": (*LABELS, "<missing>")}
    given: dict[str, Any] = objective or {"objective": "classification", "label_column": "kind"}
    model = export_model(folder / "model", corpus["vocabulary"], levels=levels, **given)
    return with_config(model, classifier={"label_column": "kind", "labels": LABELS, "calibration": None})


def test_evaluation_measures_calibration_with_the_exported_temperature(tmp_path: Path, corpus: dict[str, Path]) -> None:
    model, cells = _model(tmp_path, corpus), _cells(tmp_path, corpus, ["T cell", "B cell"])
    calibration = {"temperature": 0.25, "accuracy_above": [], "labelled_above": []}
    with_config(model, classifier={"label_column": "kind", "labels": LABELS, "calibration": calibration})
    figures = _reconstruct(corpus, tmp_path, model, cells)["figures"]
    predicted = cellmill.load(model).predict(ad.read_h5ad(cells))
    right = np.asarray(predicted.labels, object) == ad.read_h5ad(cells).obs["kind"].to_numpy(object)
    expected = calibration_error(predicted.obs["cellmill_probability"].astype(np.float64), right.astype(np.float64))
    assert figures["calibration_error"] == pytest.approx(expected, abs=1e-5)
    assert figures["temperature"] == 0.25
    assert figures["calibration_error_uncalibrated"] < figures["calibration_error"]  # random weights, made surer


def _cells(folder: Path, corpus: dict[str, Path], kinds: list[str | None] | None) -> Path:
    adata = ad.read_h5ad(corpus["cells"])
    if kinds is not None:
        adata.obs["kind"] = pd.Categorical([kinds[i % len(kinds)] for i in range(adata.n_obs)])
    adata.write_h5ad(folder / "cells.h5ad")
    return folder / "cells.h5ad"


def _reconstruct(corpus: dict[str, Path], folder: Path, model: Path, cells: Path) -> dict[str, Any]:
    embedding = embed(model, cells, folder / "embedding" / "cells.h5ad")
    files, out = {**corpus, "model": model, "cells": cells, "embedding": embedding}, folder / "run" / "evaluate"
    metrics = evaluate(files, out / "metrics.json", "-", tasks={"reconstruct": {}}, cells="all")
    result: dict[str, Any] = metrics["datasets"]["cells"]["tasks"]["reconstruct"]
    return result


def test_evaluation_names_labels_that_the_model_does_not_know(
    tmp_path: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cells = _cells(tmp_path, corpus, ["T cell", "HSC", "HSC", None, "B cell", "Mast"])
    n = {kind: int(count) for kind, count in ad.read_h5ad(cells).obs["kind"].value_counts().items()}
    result = _reconstruct(corpus, tmp_path, _model(tmp_path, corpus), cells)
    assert "\ncells: 100.0% of counts on known genes\n" in capsys.readouterr().out
    assert result["figures"]["n_targets"] == n["T cell"] + n["B cell"]
    assert result["figures"]["unknown_labels"] == {"HSC": n["HSC"], "Mast": n["Mast"]}
    assert result["figures"]["n_cells_of_unknown_labels"] == n["HSC"] + n["Mast"]
    said = (
        f"classification of kind: {n['HSC'] + n['Mast']} of {sum(n.values())} labelled cells have a label that the "
        f"model does not know: 'HSC' {n['HSC']}, 'Mast' {n['Mast']}; such cells are not judged."
    )
    assert result["sentences"][-1] == said
    assert len(result["sentences"]) == 2
    page = render("x", [read_run(tmp_path / "run")], [])
    assert said.replace("'", "&#39;") in page


def test_evaluation_says_that_it_knows_none_of_the_labels(tmp_path: Path, corpus: dict[str, Path]) -> None:
    parts = {"kind": {"name": "classification", "label_column": "kind"}}
    model = _model(tmp_path, corpus, objective="sum", parts=parts)
    cells = _cells(tmp_path, corpus, ["t", "b"])
    result = _reconstruct(corpus, tmp_path, model, cells)
    n = len(ad.read_h5ad(cells).obs)
    assert result["figures"]["kind.n_targets"] == 0
    assert result["figures"]["kind.unknown_labels"] == {"b": n // 2, "t": n - n // 2}
    assert result["sentences"] == [
        f"classification of kind: none of {n} labelled cells has a label that the model knows: expected T cell, B "
        f"cell; got 'b' {n // 2}, 't' {n - n // 2}; no cell is judged."
    ]
    result = _reconstruct(corpus, tmp_path / "none", model, _cells(tmp_path, corpus, None))
    assert result["sentences"] == ["classification of kind: the file has no such obs column; no cell is judged."]


@pytest.mark.parametrize("smallest", [None, 0.6])
def test_prediction_says_how_many_cells_agree_and_which_labels_are_unknown(
    tmp_path: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str], smallest: float | None
) -> None:
    model, cells = _model(tmp_path, corpus), _cells(tmp_path, corpus, ["T cell", "unknown", None, "B cell"])
    options = PredictOptions.model_validate({"embed": {}, "predict": {"min_probability": smallest}})
    predict.predict(options=options, model=model, input=cells, counts="X", out=tmp_path / "out.h5ad")
    obs = ad.read_h5ad(tmp_path / "out.h5ad").obs
    known = obs["kind"].isin(LABELS)
    equal, n_other = (
        int((obs["kind"].astype(str) == obs["cellmill_label"].astype(str))[known].sum()),
        (obs["kind"] == "unknown").sum(),
    )
    lines = capsys.readouterr().out.splitlines()
    assert "cells: 100.0% of counts on known genes" in lines
    assert (
        f"cells: {equal} of the {known.sum()} cells whose kind the model knows have it as predicted label "
        f"({equal / known.sum():.3f})"
    ) in lines
    assert (
        f"cells: warning: obs column kind: {n_other} of {known.sum() + n_other} labelled cells have a label that the "
        f"model does not know: 'unknown' {n_other}"
    ) in lines


def test_prediction_says_that_it_knows_none_of_the_labels(
    tmp_path: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = PredictOptions.model_validate({"embed": {}, "predict": {}})
    for kinds, said in (
        (["t"], "none of {n} labelled cells has a label that the model knows: expected T cell, B cell; got 't' {n}"),
        ([None], "no cell has a label"),
    ):
        cells = _cells(tmp_path, corpus, kinds)  # type: ignore[arg-type]
        predict.predict(
            options=options, model=_model(tmp_path, corpus), input=cells, counts="X", out=tmp_path / "out.h5ad"
        )
        lines = [line for line in capsys.readouterr().out.splitlines() if "obs column kind" in line]
        n = len(ad.read_h5ad(cells).obs)
        assert lines == [f"cells: warning: obs column kind: {said.format(n=n)}"]


def test_labels_of_most_cells_are_named_and_whole_numbers_are_those_of_the_shards() -> None:
    kinds = np.repeat(np.arange(30.0), np.arange(1, 31))
    obs = pd.DataFrame({"kind": [*kinds, np.nan]}, index=[str(i) for i in range(len(kinds) + 1)])
    counts = count_labels(obs, "one", "kind", ["29"])
    line = counts.problem
    assert line is not None
    assert line.startswith(
        "kind: 435 of 465 labelled cells have a label that the model does not know: '28' 29, '27' 28,"
    )
    assert line.endswith("'9' 10 and 9 more")
    assert list(counts.numbers()["unknown_labels"]) == [str(i) for i in range(28, 28 - MOST_NAMES, -1)]
    assert count_labels(obs, "one", "dataset", ["two"]).unknown == {"one": 466}
