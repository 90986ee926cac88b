"""Numbers of cells, and several heads at once, are learned alike in every layout and predicted by an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellmill.cli import main
from cellmill.config.load import stored_options
from cellmill.data.manifest import Manifest
from cellmill.data.obs_numbers import read_numbers
from cellmill.errors import UserError
from cellmill.planner.train_inputs import with_counts
from tests.distributed import cases
from tests.distributed.conftest import CONFIG, options
from tests.distributed.pool import Pool

AGE: dict[str, Any] = {"name": "regression", "target_column": "age", "target_mean": 40.0, "target_std": 9.0}
HEADS = {"kind": {"name": "classification", "label_column": "cell_type"}, "age": AGE}
OTHERS = {
    "lot": {"name": "classification", "label_column": "batch"},
    "depth": AGE | {"target_column": "depth", "target_mean": 4e3, "target_std": 1e3},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "huber": AGE | {"loss": "huber", "huber_delta": 0.5, "number_hidden": 8, "number_dropout": 0.3},
    "pearson": AGE | {"loss": "pearson", "number_hidden": 8, "number_dropout": 0.3},
    "both": {"name": "sum", "parts": {"age": AGE | {"loss": "pearson"}, "cell_decoding": {"view_loss": "vicreg"}}},
    "several": {"name": "sum", "parts": HEADS | OTHERS | {"cell_decoding": {}}},
}
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("huber", {"strategy": "ddp"}, 1024),
    ("huber", {"sharding_strategy": "FULL_SHARD", "pp": 2, "microbatches": 4}, 4096),
    ("pearson", {"strategy": "ddp"}, 1024),
    ("pearson", {"sharding_strategy": "FULL_SHARD", "pp": 2, "microbatches": 4}, 4096),
    ("pearson", {"sharding_strategy": "HYBRID_SHARD", "tp": 2}, 2048),
    ("both", {"sharding_strategy": "FULL_SHARD"}, 1024),
    ("several", {"sharding_strategy": "FULL_SHARD", "tp": 2, "sequence_parallel": True}, 4096),
]
STEPS = 4
Lines = list[dict[str, float]]


@pytest.fixture(scope="module")
def numbered(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The corpus with an age of most cells, which follows from their type, and a depth."""
    folder = tmp_path_factory.mktemp("numbered")
    cells = ad.read_h5ad(f"{corpus}/raw.h5ad")
    age = 30.0 + 8 * cells.obs["cell_type"].cat.codes.to_numpy() + np.random.default_rng(0).normal(size=len(cells))
    age[::10] = np.nan
    cells.obs = cells.obs.assign(age=age, depth=np.asarray(cells.X.sum(1)).ravel(), one=1.0)
    cells.write_h5ad(folder / "raw.h5ad")
    (folder / "datasets.tsv").write_text("dataset\tpath\nsim\traw.h5ad\n")
    (folder / "config.yaml").write_text(CONFIG.replace("TABLE", str(folder / "datasets.tsv")))
    shared, made = f"--config {folder}/config.yaml --corpus sim", f"{folder}/cells/sim.h5ad"
    for command in (
        f"preprocess {shared} --input {folder}/raw.h5ad --dataset sim --out {made} --report {folder}/sim.json",
        f"vocabulary {shared} --cells {made} --out {folder}/vocabulary.tsv",
        f"shard {shared} --cells {made} --vocabulary {folder}/vocabulary.tsv --out {folder}/shards/manifest.json",
    ):
        assert main(command.split()) == 0
    return str(folder)


def _options(objective: str, token_budget: int, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    train = {"token_budget": token_budget, "val_every_steps": 2}
    return options(layout, train=train) | {"objective": OBJECTIVES[objective]}


@pytest.fixture(scope="module")
def references(alone: None, numbered: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lines]:
    """Lines of one process with one micro-batch a step."""
    return {
        name: cases.logged(numbered, _options(name, 8192), str(tmp_path_factory.mktemp("one")), STEPS)
        for name in OBJECTIVES
    }


@pytest.mark.parametrize(("objective", "layout", "token_budget"), CASES, ids=str)
def test_losses_and_figures_are_those_of_one_process(
    pool: Pool,
    numbered: str,
    references: dict[str, Lines],
    tmp_path: Path,
    objective: str,
    layout: dict[str, Any],
    token_budget: int,
) -> None:
    given = _options(objective, token_budget, layout)
    lines = pool.run("logged", corpus=numbered, options=given, folder=str(tmp_path), steps=STEPS)[0]
    expected = references[objective]
    several = {"val_accuracy_kind", "val_accuracy_lot", "val_pearson_age"}
    figures = {"several": several, "both": {"val_pearson_age"}}
    assert any(figures.get(objective, {"val_pearson"}) <= line.keys() for line in expected)
    assert [line.keys() for line in lines] == [line.keys() for line in expected]
    for line, other in zip(lines, expected):
        np.testing.assert_allclose(list(line.values()), list(other.values()), atol=5e-6, rtol=5e-6, err_msg=str(other))


def test_numbers_are_standardised_on_training_cells(numbered: str) -> None:
    manifest = Manifest.read(Path(numbered) / "shards" / "manifest.json")
    shards = [ad.read_h5ad(manifest.shard_path(shard)).obs["age"] for shard in manifest.splits["train"].shards]
    ages = pd.concat(shards)
    np.testing.assert_array_equal(read_numbers(manifest, "train", ["age"])[:, 0], ages)
    assert ages.isna().any()

    def fitted(**objective: Any) -> Any:
        tree = options() | {"objective": {"name": "regression"} | objective}
        return with_counts(stored_options(tree, "test"), manifest).objective

    own = fitted(target_column="age")
    assert (own.target_mean, own.target_std) == pytest.approx((ages.mean(), ages.std(ddof=0)))
    assert fitted(target_column="age", target_std=2.0).target_std == 2.0
    for column, message in {
        "one": "objective.target_column one: expected numbers that differ, got",
        "batch": "obs column 'batch' (objective.target_column) is text, such as 'batch",
        "agee": "no obs column 'agee'; did you mean 'age'?",
    }.items():
        with pytest.raises(UserError) as error:
            fitted(target_column=column)
        assert message in str(error.value)


def test_an_export_predicts_every_column_in_its_own_unit(alone: None, numbered: str, tmp_path: Path) -> None:
    train, model, out = tmp_path / "train", tmp_path / "model", tmp_path / "out.h5ad"
    tree = options(train={"steps": 80, "lr": 1e-2, "global_batch": 32, "token_budget": 8192, "clip_norm": None})
    tree |= {"model": {"family": "profile", "hidden": 16, "layers": 1}}
    parts = HEADS | {"lot": OTHERS["lot"]}
    cases.logged(numbered, tree | {"objective": {"name": "sum", "parts": parts}}, str(train), 80)
    (train / "run.json").write_text(json.dumps({"manifest": f"{numbered}/shards/manifest.json"}))
    cases.exported(numbered, train, model)
    assert "| predicts | numbers of obs column age |" in (model / "README.md").read_text()
    words = ["predict", "--options", '{"embed": {}, "predict": {}}', "--model", str(model)]
    assert main([*words, "--input", f"{numbered}/raw.h5ad", "--out", str(out)]) == 0
    found = ad.read_h5ad(out)
    known = found.obs["age"].notna()
    assert np.abs(found.obs["cellmill_value"] - found.obs["age"])[known].mean() < 4
    assert (found.obs["cellmill_label"].astype(str) == found.obs["cell_type"].astype(str)).mean() > 0.9
    assert set(found.obs["cellmill_label_lot"].cat.categories) == set(found.obs["batch"].astype(str))
    assert found.obsm["cellmill_probabilities_lot"].shape == (len(found), 2)
    about = found.uns["cellmill_prediction"]
    assert (about["value_column"], about["label_column"], about["label_column_lot"]) == ("age", "cell_type", "batch")
    assert {"temperature", "temperature_lot"} <= about.keys()
