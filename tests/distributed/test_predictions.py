"""Labels and numbers that an export predicts, calibrated and in their units, and the obs columns
that it reads.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

from cellmill import open_cells
from cellmill.cli import main
from cellmill.config.load import stored_options
from cellmill.config.run import Embed
from cellmill.data.inputs.formats import open_counts
from cellmill.data.shards.index import CellColumns
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.cell_stream import CellStream
from cellmill.data.stream.micro_batches import MicroBatchRule
from cellmill.errors import UserError
from cellmill.evaluate.inference import calibration
from cellmill.evaluate.inference.calibration import keep_cells
from cellmill.evaluate.inference.embed import embed_cells, load_for_inference
from cellmill.models.batch import to_tensors
from cellmill.models.export import load_model
from cellmill.stages.training_inputs import fit_options
from tests.distributed import cases, conformance
from tests.distributed.conftest import options

LABEL = {"name": "classification", "label_column": "cell_type"}
HEADS: dict[str, Any] = {
    "kind": LABEL,
    "age": {"name": "regression", "target_column": "age", "target_mean": 40.0, "target_std": 9.0},
    "lot": {"name": "classification", "label_column": "batch"},
}


@pytest.fixture(scope="module")
def trained(alone: None, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of 60 steps."""
    folder = tmp_path_factory.mktemp("train")
    train = {"steps": 60, "lr": 1e-2, "global_batch": 32, "token_budget": 8192, "clip_norm": None}
    given = options(train=train) | {
        "objective": LABEL,
        "model": {"family": "profile", "hidden": 16, "layers": 1},
    }
    cases.trained(corpus, given, str(folder), 60)
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


def _predict(
    model: Path, source: Path, out: Path, section: dict[str, Any], *more: str
) -> ad.AnnData:
    given = json.dumps({"embed": {}, "predict": section})
    words = [
        "predict",
        "--options",
        given,
        "--model",
        str(model),
        "--input",
        str(source),
        "--out",
        str(out),
        *more,
    ]
    assert main(words) == 0
    return ad.read_h5ad(out)


def test_labels_are_predicted_at_the_validation_temperature(
    model: Path, corpus: str, tmp_path: Path
) -> None:
    classifier = json.loads((model / "config.json").read_text())["classifier"]
    calibration = classifier["calibration"]
    raw = Path(corpus) / "raw.h5ad"
    assert calibration["n_cells"] > 20
    assert calibration["calibration_error"] <= calibration["calibration_error_uncalibrated"] + 0.05
    assert f"temperature {calibration['temperature']:.2f}" in (model / "README.md").read_text()
    found = _predict(model, raw, tmp_path / "out.h5ad", {})
    assert classifier["labels"] == list(found.obs["cellmill_label"].cat.categories)
    assert (
        found.obs["cellmill_label"].astype(str) == found.obs["cell_type"].astype(str)
    ).mean() > 0.9
    probabilities = np.asarray(found.obsm["cellmill_probabilities"])
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    np.testing.assert_array_equal(probabilities.max(1), found.obs["cellmill_probability"])
    assert found.uns["cellmill_prediction"]["temperature"] == calibration["temperature"]


def test_kept_cells_have_the_vectors_of_all_cells(model: Path, corpus: str) -> None:
    network = load_model(model)[0]
    lengths = [3, 0, 5, 2]
    ids = np.arange(sum(lengths)) + 2
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    batch = Batch(ids, ids.astype(np.float32), ends, np.arange(4))
    is_kept = np.array([True, False, False, True])
    kept = keep_cells(batch, is_kept)
    assert kept.lengths == [3, 2]
    with torch.inference_mode():
        every, some = (network.embed(to_tensors(cells)) for cells in (batch, kept))
    torch.testing.assert_close(some, every[torch.from_numpy(is_kept)])


def test_a_large_model_is_calibrated_on_the_first_cells(
    trained: Path, corpus: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "MAX_FLOPS", 1.0)  # the first micro-batch
    monkeypatch.setattr(calibration, "CellStream", partial(_in_small_batches, CellStream))
    relative = os.path.relpath(f"{corpus}/shards/manifest.json", trained.parent)
    few = _exported(trained, corpus, relative, tmp_path)
    n_cells = [
        json.loads((folder / "config.json").read_text())["classifier"]["calibration"]["n_cells"]
        for folder in (few, model)
    ]
    assert 0 < n_cells[0] < n_cells[1]


def _in_small_batches(make: Any, *words: Any, **named: Any) -> Any:
    return make(*words[:3], MicroBatchRule(100), **named)


def test_missing_shards_leave_probabilities_uncalibrated(
    trained: Path, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _exported(trained, corpus, "gone/manifest.json", tmp_path / "model")
    assert (
        "| labels | not calibrated: gone/manifest.json was not found |\n"
        in (model / "README.md").read_text()
    )
    _predict(model, Path(corpus) / "raw.h5ad", tmp_path / "out.h5ad", {})
    told = "warning: probabilities are not calibrated: gone/manifest.json was not found\n"
    assert capsys.readouterr().out.count(told) >= 1


def test_cells_below_the_threshold_get_no_label(
    model: Path, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = Path(corpus) / "raw.h5ad"
    own = tmp_path / "own.h5ad"
    every = _predict(model, raw, own, {"min_probability": 0.5}, "--append")
    assert own.exists()
    some = _predict(model, own, own, {"min_probability": 0.99}, "--append")
    for found, smallest in ((every, 0.5), (some, 0.99)):
        below = found.obs["cellmill_probability"] < smallest
        assert (found.obs["cellmill_label"].isna() == below).all()
        assert (found.obs["cellmill_rejected"] == below).all()
        assert found.uns["cellmill_prediction"]["n_rejected"] == below.sum()
    assert some.uns["cellmill_prediction"]["n_rejected"] > 0
    before = ad.read_h5ad(raw)
    assert (some.X != before.X).nnz == 0
    assert list(some.obs.columns) == [
        *before.obs.columns,
        "cellmill_label",
        "cellmill_probability",
        "cellmill_rejected",
    ]
    given = [
        "predict",
        "--model",
        str(model),
        "--input",
        str(raw),
        "--out",
        str(tmp_path / "b.h5ad"),
        "--options",
    ]
    config = json.loads((model / "config.json").read_text())
    config["classifier"]["calibration"]["accuracy_above"] = [0.5, 0.7509, None]
    (model / "config.json").write_text(json.dumps(config))
    assert main([*given, '{"embed": {}, "predict": {"min_accuracy": 0.9}}']) == 2
    message = "predict.min_accuracy 0.9: no threshold reaches it on the validation cells, the best has 0.750; lower it"
    assert message in capsys.readouterr().err
    assert main([*given, '{"embed": {}, "predict": {"min_accuracy": 0.751}}']) == 2
    assert "the best has 0.750; lower it" in capsys.readouterr().err
    assert main([*given, '{"embed": {}, "predict": {"min_accuracy": 0.7}}']) == 0
    assert ad.read_h5ad(tmp_path / "b.h5ad").uns["cellmill_prediction"]["min_probability"] == 0.01


def test_numbers_are_standardised_on_training_cells(corpus: str) -> None:
    manifest = Manifest.read(Path(corpus) / "shards" / "manifest.json")
    shards = [
        ad.read_h5ad(manifest.shard_path(shard)).obs["age"]
        for shard in manifest.splits["train"].shards
    ]
    ages = pd.concat(shards)
    np.testing.assert_array_equal(CellColumns(manifest, "train", "numbers", ["age"])[:][:, 0], ages)
    assert ages.isna().any()

    def objective(**given: Any) -> Any:
        tree = options() | {"objective": {"name": "regression"} | given}
        return fit_options(stored_options(tree, "test"), Path(corpus), manifest).objective

    own = objective(target_column="age")
    assert (own.target_mean, own.target_std) == pytest.approx((ages.mean(), ages.std(ddof=0)))
    assert objective(target_column="age", target_std=2.0).target_std == 2.0
    for column, message in {
        "one": "objective.target_column one: expected numbers that differ, got",
        "batch": "obs column 'batch' (objective.target_column) is text; choose one of: ",
        "agee": "no obs column 'agee' (objective.target_column); did you mean 'age'?",
    }.items():
        with pytest.raises(UserError) as error:
            objective(target_column=column)
        assert message in str(error.value)


def test_an_export_predicts_every_column_in_its_own_unit(
    alone: None, corpus: str, tmp_path: Path
) -> None:
    train = tmp_path / "train"
    tree = options(
        train={"steps": 80, "lr": 1e-2, "global_batch": 32, "token_budget": 8192, "clip_norm": None}
    )
    tree |= {"model": {"family": "profile", "hidden": 16, "layers": 1}}
    cases.trained(corpus, tree | {"objective": {"name": "sum", "parts": HEADS}}, str(train), 80)
    model = _exported(train, corpus, f"{corpus}/shards/manifest.json", tmp_path / "model")
    assert "| predicts | numbers of obs column age |" in (model / "README.md").read_text()
    found = _predict(model, Path(corpus) / "raw.h5ad", tmp_path / "out.h5ad", {})
    known = found.obs["age"].notna()
    assert np.abs(found.obs["cellmill_value"] - found.obs["age"])[known].mean() < 4
    assert (
        found.obs["cellmill_label"].astype(str) == found.obs["cell_type"].astype(str)
    ).mean() > 0.9
    assert set(found.obs["cellmill_label_lot"].cat.categories) == set(
        found.obs["batch"].astype(str)
    )
    assert found.obsm["cellmill_probabilities_lot"].shape == (len(found), 2)
    about = found.uns["cellmill_prediction"]
    assert (about["value_column"], about["label_column"], about["label_column_lot"]) == (
        "age",
        "cell_type",
        "batch",
    )
    assert {"temperature", "temperature_lot"} <= about.keys()


def test_an_exported_model_reads_the_columns_of_a_file(
    alone: None, corpus: str, tmp_path: Path
) -> None:
    cases.trained(corpus, conformance.run("encoder, batch", {}, {}), str(tmp_path / "train"), 4)
    exported = cases.exported(corpus, tmp_path / "train", tmp_path)
    assert {
        "batch_terms.weight",
        "batch_adversary.out.bias",
        "covariates.tables.1.weight",
    } <= exported.keys()
    model = load_for_inference(tmp_path)
    obs = ad.read_h5ad(Path(corpus) / "sim.h5ad").obs
    assert model.config["levels"] == {
        name: sorted(obs[name].unique()) for name in ("batch", "donor")
    }

    def embed(cells: ad.AnnData, name: str) -> np.ndarray:
        path = tmp_path / name / "sim.h5ad"
        path.parent.mkdir()
        cells.write_h5ad(path)
        with open_counts(path) as reader:
            return embed_cells(reader, model, Embed()).vectors

    cells: ad.AnnData = open_cells(Path(corpus) / "sim.h5ad")
    vectors = embed(cells, "known")
    cells.obs["donor"] = "a stranger"
    unknown = embed(cells, "unknown")
    del cells.obs["donor"]
    absent = embed(cells, "absent")
    assert np.abs(vectors - unknown).max() > 1e-4
    np.testing.assert_array_equal(unknown, absent)
