"""Numbers that a model predicts, against those of the file: plain sums, and what is not measured."""

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest

from cellmill.cli import main
from cellmill.config.parts.objectives import RegressionConfig
from cellmill.config.parts.tokens import Tokens
from cellmill.evaluate.inference.agreement import compare_labels, compare_numbers
from cellmill.evaluate.seen.seen_cells import Seen
from cellmill.models.objectives.regression import Regression
from tests.unit.exported import export_model


def _draw() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    given = generator.normal(40, 5, 60)
    predicted = given + generator.normal(0, 3, 60)
    given[3] = np.nan
    predicted[4] = np.nan
    return given, predicted, np.arange(60) % 3 == 0


def test_a_cell_without_a_vector_is_not_called_rejected() -> None:
    given = np.array(["T", "B", "T"], object)
    predicted = np.array(["T", "B", None], object)
    seen = Seen(np.zeros(3, bool), "")
    figures, [line] = compare_labels("cell_type", given, predicted, ["B", "T"], seen)
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert line.endswith("2 of 3 (0.667, 1 without a predicted label)")


def test_only_unseen_cells_have_figures() -> None:
    given, predicted, seen = _draw()
    figures, lines = compare_numbers("age", given, predicted, 38.0, Seen(seen, ""))
    kept = [cell for cell in range(60) if cell not in (3, 4) and cell % 3]
    n = len(kept)
    x = [given[cell] for cell in kept]
    y = [predicted[cell] for cell in kept]
    covariance = sum((a - sum(x) / n) * (b - sum(y) / n) for a, b in zip(x, y))
    spread = sum((a - sum(x) / n) ** 2 for a in x) * sum((b - sum(y) / n) ** 2 for b in y)
    error = sum(abs(a - b) for a, b in zip(x, y)) / n
    of_mean = sum(abs(a - 38) for a in x) / n
    assert figures["n_numbers_unseen"] == n
    assert figures["n_numbers_seen"] == 19
    assert figures["pearson"] == pytest.approx(covariance / spread**0.5)
    assert figures["mean_absolute_error"] == pytest.approx(error)
    assert figures["mean_absolute_error_of_mean"] == pytest.approx(of_mean)
    assert error < of_mean
    assert lines[0] == (
        f"age: on cells that the model was not trained on: {n} cells, correlation {figures['pearson']:.3f}, mean "
        f"absolute error {error:.4g}, less than {of_mean:.4g} of the training mean (38)"
    )
    assert lines[1].startswith(
        "age: on cells of its training or validation, which do not measure accuracy: 19 cells, "
    )
    _, lines = compare_numbers("age", given, predicted + 90, 38.0, Seen(seen, "a parent"))
    assert ", not less than " in lines[0]
    assert lines[0].endswith("; a parent")


def test_numbers_without_a_unit_have_a_correlation_only() -> None:
    given, predicted, seen = _draw()
    figures, [line, _] = compare_numbers("age", given, predicted, None, Seen(seen, ""))
    assert {*figures} == {"n_numbers_unseen", "n_numbers_seen", "pearson"}
    assert "error" not in line
    constant, [line, _] = compare_numbers("age", given, np.ones(60), None, Seen(seen, ""))
    assert "pearson" not in constant
    assert line.endswith(" cells")


def test_nothing_is_measured_without_numbers_or_training_cells() -> None:
    given, predicted, seen = _draw()
    assert compare_numbers("age", given * np.nan, predicted, 1.0, Seen(seen, "")) == ({}, [])
    figures, [line] = compare_numbers("age", given, predicted, 38.0, Seen(None, "no list"))
    assert figures == {}
    assert line.endswith("but it is unknown whether the model was trained on them (no list)")


@pytest.mark.parametrize("loss", ["mse", "pearson"])
def test_predict_prints_the_comparison(
    corpus: dict[str, Path],
    simulated: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    loss: str,
) -> None:
    options: dict[str, Any] = {"target_column": "age", "target_mean": 40.0, "target_std": 12.0}
    options |= {"objective": "regression", "loss": loss}
    model = export_model(tmp_path / "model", corpus["vocabulary"], seed=1, **options)
    cells = ad.read_h5ad(simulated)
    cells.obs["age"] = np.arange(cells.n_obs) % 50
    given = tmp_path / "cells.h5ad"
    cells.write_h5ad(given)
    words = ["predict", "--model", str(model), "--input", str(given)]
    assert main([*words, "--out", str(tmp_path / "out.h5ad")]) == 0
    printed = capsys.readouterr().out
    written = ad.read_h5ad(tmp_path / "out.h5ad").obs
    r = np.corrcoef(written["age"], written["cellmill_value"])[0, 1]
    assert f"cells: age: {cells.n_obs} cells, correlation {r:.3f}, " in printed
    error = np.abs(written["age"] - written["cellmill_value"]).mean()
    assert (f"mean absolute error {error:.4g}, " in printed) == (loss == "mse")
    cells.obs["age"] = "old"
    cells.write_h5ad(given)
    assert main([*words, "--out", str(tmp_path / "out.h5ad")]) == 0
    assert "cells: warning: obs column age: no cell has a number\n" in capsys.readouterr().out
    del cells.obs["age"]
    cells.write_h5ad(given)
    assert main([*words, "--out", str(tmp_path / "out.h5ad")]) == 0
    printed = capsys.readouterr().out
    assert "correlation" not in printed
    assert "no cell has a number" not in printed


@pytest.mark.parametrize("rounding", [-1e-15, 0.0, 1e-15])
def test_equal_numbers_and_predictions_have_no_correlation(rounding: float) -> None:
    regression = Regression(RegressionConfig(target_column="age"), Tokens())
    # n, sums of x and y, of their squares and their products: a few ulps beside equal values
    sums = (3.0, 0.3, 0.6, 0.03 + rounding, 0.12 + rounding, 0.06)
    assert regression.validation_metrics(sums) == {}
    pairs = np.array([[1.0, 2.0], [2.0, 3.0], [4.0, 9.0]])
    x, y = pairs.T
    moments = (3.0, x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum())
    expected = {"pearson": pytest.approx(np.corrcoef(x, y)[0, 1])}
    assert regression.validation_metrics(moments) == expected
