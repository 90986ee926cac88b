"""Labels are learned alike in every layout, by any method, and an export predicts them, calibrated."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest

from cellmill.cli import main
from tests.distributed import cases
from tests.distributed.conftest import options
from tests.distributed.pool import Pool

LABEL = {"name": "classification", "label_column": "cell_type"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "hidden layer": LABEL | {"head_hidden": 8, "head_dropout": 0.3, "class_weights": {"type1": 3.0}},
    "sum": {
        "name": "sum",
        "parts": {
            "classification": {"label_column": "cell_type"},
            "hidden": LABEL | {"adversarial_scale": 0.1},
            "cell_decoding": {},
        },
    },
}
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("hidden layer", {"strategy": "ddp"}, 1024),
    ("hidden layer", {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True}, 4096),
    ("hidden layer", {"sharding_strategy": "FULL_SHARD", "pp": 2, "microbatches": 4}, 4096),
    ("sum", {"sharding_strategy": "HYBRID_SHARD"}, 1024),
]
THEN: dict[str, dict[str, Any]] = {"sum": {"sharding_strategy": "FULL_SHARD", "tp": 2}}
"""Layout of the last two steps, if another."""
STEPS = 4
Lines = list[dict[str, float]]


def _options(objective: str, token_budget: int, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    train = {"token_budget": token_budget, "val_every_steps": 2, "checkpoint_every_steps": 2}
    return options(layout, train=train) | {"objective": OBJECTIVES[objective]}


@pytest.fixture(scope="module")
def references(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lines]:
    """Lines of one process with one micro-batch a step."""
    return {
        name: cases.logged(corpus, _options(name, 8192), str(tmp_path_factory.mktemp("one")), STEPS)
        for name in OBJECTIVES
    }


@pytest.mark.parametrize(("objective", "layout", "token_budget"), CASES, ids=str)
def test_losses_and_validation_are_those_of_one_process(
    pool: Pool,
    corpus: str,
    references: dict[str, Lines],
    tmp_path: Path,
    objective: str,
    layout: dict[str, Any],
    token_budget: int,
) -> None:
    given = {"corpus": corpus, "folder": str(tmp_path)}
    then, first = THEN.get(objective), _options(objective, token_budget, layout)
    lines: Lines = pool.run("logged", options=first, steps=STEPS if then is None else 2, **given)[0]
    if then is not None:
        rest = _options(objective, token_budget, then)
        lines += pool.run("logged", options=rest, steps=STEPS, load=True, **given)[0]
    expected = references[objective]
    assert any("val_loss" in line for line in expected)
    assert [line.keys() for line in lines] == [line.keys() for line in expected]
    for line, other in zip(lines, expected):
        np.testing.assert_allclose(list(line.values()), list(other.values()), atol=5e-6, rtol=5e-6, err_msg=str(other))


@pytest.fixture(scope="module")
def trained(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of 60 steps."""
    folder = tmp_path_factory.mktemp("train")
    train = {"steps": 60, "lr": 1e-2, "global_batch": 32, "token_budget": 8192, "clip_norm": None}
    given = options(train=train) | {"objective": LABEL, "model": {"family": "profile", "hidden": 16, "layers": 1}}
    cases.logged(corpus, given, str(folder), 60)
    return folder


def _exported(trained: Path, corpus: str, manifest: str, out: Path) -> Path:
    (trained / "run.json").write_text(json.dumps({"manifest": manifest}))
    cases.exported(corpus, trained, out)
    return out


@pytest.fixture(scope="module")
def model(trained: Path, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export; its training was started in a folder above, with a relative path of the shards."""
    relative = os.path.relpath(f"{corpus}/shards/manifest.json", trained.parent)
    return _exported(trained, corpus, relative, tmp_path_factory.mktemp("model"))


def _predict(model: Path, source: Path, out: Path, section: dict[str, Any], *more: str) -> ad.AnnData:
    given = json.dumps({"embed": {}, "predict": section})
    words = ["predict", "--options", given, "--model", str(model), "--input", str(source), "--out", str(out), *more]
    assert main(words) == 0
    return ad.read_h5ad(out)


def test_an_export_predicts_labels_with_the_temperature_of_its_validation_cells(
    model: Path, corpus: str, tmp_path: Path
) -> None:
    classifier = json.loads((model / "config.json").read_text())["classifier"]
    calibration, raw = classifier["calibration"], Path(corpus) / "raw.h5ad"
    assert calibration["n_cells"] > 20
    assert calibration["calibration_error"] <= calibration["calibration_error_uncalibrated"] + 0.05
    assert f"temperature {calibration['temperature']:.2f}" in (model / "README.md").read_text()
    found = _predict(model, raw, tmp_path / "out.h5ad", {})
    assert classifier["labels"] == list(found.obs["cellmill_label"].cat.categories)
    assert (found.obs["cellmill_label"].astype(str) == found.obs["cell_type"].astype(str)).mean() > 0.9
    probabilities = np.asarray(found.obsm["cellmill_probabilities"])
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    np.testing.assert_array_equal(probabilities.max(1), found.obs["cellmill_probability"])
    assert found.uns["cellmill_prediction"]["temperature"] == calibration["temperature"]


def test_shards_that_are_not_found_are_the_reason_of_probabilities_without_calibration(
    trained: Path, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _exported(trained, corpus, "gone/manifest.json", tmp_path / "model")
    assert "| labels | not calibrated: gone/manifest.json was not found |\n" in (model / "README.md").read_text()
    _predict(model, Path(corpus) / "raw.h5ad", tmp_path / "out.h5ad", {})
    told = "warning: probabilities are not calibrated: gone/manifest.json was not found\n"
    assert capsys.readouterr().out.count(told) >= 1


def test_cells_below_the_threshold_are_unknown_and_the_rest_of_a_file_stays(
    model: Path, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, own = Path(corpus) / "raw.h5ad", tmp_path / "own.h5ad"
    every = _predict(model, raw, own, {"min_probability": 0.5}, "--append")
    assert own.exists()
    some = _predict(model, own, own, {"min_probability": 0.99}, "--append")
    for found, smallest in ((every, 0.5), (some, 0.99)):
        below = found.obs["cellmill_probability"] < smallest
        assert ((found.obs["cellmill_label"] == "unknown") == below).all()
        assert found.uns["cellmill_prediction"]["n_unknown"] == below.sum()
    assert some.uns["cellmill_prediction"]["n_unknown"] > 0
    before = ad.read_h5ad(raw)
    assert (some.X != before.X).nnz == 0
    assert list(some.obs.columns) == [*before.obs.columns, "cellmill_label", "cellmill_probability"]
    given = ["predict", "--model", str(model), "--input", str(raw), "--out", str(tmp_path / "b.h5ad"), "--options"]
    config = json.loads((model / "config.json").read_text())
    config["classifier"]["calibration"]["accuracy_above"] = [0.5, 0.75, None]
    (model / "config.json").write_text(json.dumps(config))
    assert main([*given, '{"embed": {}, "predict": {"min_accuracy": 0.9}}']) == 2
    message = "predict.min_accuracy 0.9: no threshold reaches it on the validation cells, the best has 0.750; lower it"
    assert message in capsys.readouterr().err
    assert main([*given, '{"embed": {}, "predict": {"min_accuracy": 0.7}}']) == 0
    assert ad.read_h5ad(tmp_path / "b.h5ad").uns["cellmill_prediction"]["min_probability"] == 0.01
