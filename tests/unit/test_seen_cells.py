"""Accuracy of predicted labels is that of cells which neither the model nor one before it was
trained on.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from small_corpus import read_obs

import cellmill
from cellmill.config.options import PredictOptions
from cellmill.data.shards.manifest import Manifest
from cellmill.evaluate.seen.training_cells import find_training_cells
from cellmill.stages import cells as predict
from tests.models import train_options
from tests.unit.evaluated import export_classifier, with_config
from tests.unit.exported import make_corpus

LABELS = ["a", "b"]
OBJECTIVE = {"name": "classification", "label_column": "kind"}


def make_run(folder: Path, corpus: dict[str, Path], **record: Any) -> Path:
    """The model of a run on a corpus, with the record of its training beside it."""
    model = export_classifier(folder / "model", corpus["vocabulary"], "kind", LABELS)
    options = train_options(objective=OBJECTIVE, model={"family": "profile"})
    manifest = Manifest.read(corpus["manifest"])
    fingerprint = manifest.fingerprint_with(options.read_columns(), options.number_columns())
    (folder / "train").mkdir(parents=True)
    written = {"options": options.model_dump(mode="json"), "manifest": str(corpus["manifest"])}
    (folder / "train" / "run.json").write_text(json.dumps(written | record))
    return with_config(model, fingerprint=fingerprint)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory, simulated: Path) -> Path:
    """The simulated cells with a label for all but a few."""
    adata = ad.read_h5ad(simulated)
    kinds = np.random.default_rng(0).choice(
        [*LABELS, "other", None], adata.n_obs, p=[0.5, 0.3, 0.1, 0.1]
    )
    adata.obs["kind"] = pd.Categorical(kinds)
    path = tmp_path_factory.mktemp("labelled") / "labelled.h5ad"
    adata.write_h5ad(path)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, cells: Path) -> dict[str, Path]:
    return make_corpus(tmp_path_factory.mktemp("corpus"), cells)


def names_of(corpus: dict[str, Path], *splits: str) -> set[str]:
    """Names of the cells of these splits, read from the shards as any program reads them."""
    names = read_obs(Manifest.read(corpus["manifest"]), *splits).index
    return {name.partition(":")[2] for name in names}


def run_predict(model: Path, source: Path, out: Path, smallest: float | None = None) -> ad.AnnData:
    options = PredictOptions.model_validate({"embed": {}, "predict": {"min_probability": smallest}})
    predict.predict(options=options, model=model, input=source, counts="X", out=out)
    return ad.read_h5ad(out)


def test_the_accuracy_counts_only_cells_never_trained_on(
    tmp_path: Path, cells: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_run(tmp_path / "run", corpus)
    renamed = ad.read_h5ad(cells)
    unseen = renamed.obs_names.isin(names_of(corpus, "test"))
    # cells are known by their counts
    renamed.obs_names = [f"other {i}" for i in range(renamed.n_obs)]
    renamed.write_h5ad(tmp_path / "renamed.h5ad")
    found = run_predict(model, tmp_path / "renamed.h5ad", tmp_path / "out.h5ad")

    known = found.obs["kind"].isin(LABELS)
    right = found.obs["kind"].astype(str) == found.obs["cellmill_label"].astype(str)
    assert (found.obs["cellmill_seen_in_training"] == ~unseen).all()
    n_unseen = int((known & unseen).sum())
    n_right = int((right & known & unseen).sum())
    n_unknown = int((found.obs["kind"] == "other")[unseen].sum())
    assert n_unknown
    n_seen = int((known & ~unseen).sum())
    n_right_seen = int((right & known & ~unseen).sum())
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("renamed: kind: ")] == [
        f"renamed: kind: accuracy on cells that the model was not trained on: {n_right} of {n_unseen} "
        f"({n_right / n_unseen:.3f}), without {n_unknown} of labels that it does not know",
        f"renamed: kind: on cells of its training or validation, which do not measure accuracy: "
        f"{n_right_seen} of {n_seen} ({n_right_seen / n_seen:.3f}) as in the file",
    ]
    about = found.uns["cellmill_prediction"]
    assert about["accuracy"] == pytest.approx(n_right / n_unseen)
    assert (about["n_labelled_unseen"], about["n_labelled_seen"]) == (n_unseen, n_seen)
    assert about["n_seen_in_training"] == (~unseen).sum()


def test_cells_with_fewer_genes_are_recognised_by_the_rest(
    tmp_path: Path, cells: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_run(tmp_path / "run", corpus)
    fewer = ad.read_h5ad(cells)[:, 60:].copy()
    is_seen = ~fewer.obs_names.isin(names_of(corpus, "test"))
    fewer.obs_names = [f"other {i}" for i in range(fewer.n_obs)]
    fewer.write_h5ad(tmp_path / "fewer.h5ad")
    found = run_predict(model, tmp_path / "fewer.h5ad", tmp_path / "out.h5ad")
    assert (found.obs["cellmill_seen_in_training"] == is_seen).all()
    few = ad.read_h5ad(cells)[:, :8].copy()
    few.write_h5ad(tmp_path / "few.h5ad")
    found = run_predict(model, tmp_path / "few.h5ad", tmp_path / "out.h5ad")
    assert not found.obs["cellmill_seen_in_training"].any(), "eight genes tell no cell"


def test_a_dataset_of_training_cells_has_no_accuracy(
    tmp_path: Path, cells: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_run(tmp_path / "run", corpus)
    adata = ad.read_h5ad(cells)
    trained = adata[adata.obs_names.isin(names_of(corpus, "train", "val"))].copy()
    trained.write_h5ad(tmp_path / "trained.h5ad")
    found = run_predict(model, tmp_path / "trained.h5ad", tmp_path / "out.h5ad")
    [line] = [line for line in capsys.readouterr().out.splitlines() if "accuracy" in line]
    assert line.startswith("trained: kind: on cells of its training or validation, which do not")
    assert "accuracy" not in found.uns["cellmill_prediction"]


def test_a_copied_model_reports_its_cells_as_unknown(
    tmp_path: Path, cells: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    copied = shutil.copytree(make_run(tmp_path / "run", corpus), tmp_path / "copied")
    found = run_predict(copied, cells, tmp_path / "out.h5ad")
    [line] = [line for line in capsys.readouterr().out.splitlines() if "accuracy" in line]
    assert (
        " as in the file; no accuracy, because it is unknown whether the model was trained on them ("
        in line
    )
    reason = f"{copied} is not in the folder of its run, which names its training cells"
    assert line.endswith(f"({reason})")
    assert found.uns["cellmill_prediction"]["training_cells_unknown"] == reason
    assert "cellmill_seen_in_training" not in found.obs


def test_cells_of_the_model_before_it_are_seen_too(tmp_path: Path, cells: Path) -> None:
    adata = ad.read_h5ad(cells)
    parts = {"first": adata[:300], "second": adata[300:]}
    corpora = {}
    for name, part in parts.items():
        part.copy().write_h5ad(tmp_path / f"{name}.h5ad")
        corpora[name] = make_corpus(tmp_path / f"corpus of {name}", tmp_path / f"{name}.h5ad")
    first = make_run(tmp_path / "runs" / "first", corpora["first"])
    second = make_run(tmp_path / "runs" / "second", corpora["second"], init_from=str(first))
    found = run_predict(second, cells, tmp_path / "out.h5ad")
    trained = names_of(corpora["first"], "train", "val") | names_of(
        corpora["second"], "train", "val"
    )
    assert set(found.obs_names[found.obs["cellmill_seen_in_training"]]) == trained


def test_a_model_before_it_without_known_cells_is_named(
    tmp_path: Path, cells: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_run(tmp_path / "run", corpus, init_from="results/hub/me/pbmc")
    run_predict(model, cells, tmp_path / "out.h5ad")
    unknown = "; the training cells of results/hub/me/pbmc, before this model, are not known"
    assert [line for line in capsys.readouterr().out.splitlines() if line.endswith(unknown)]


def test_damaged_shards_do_not_hide_the_models_before_them(
    tmp_path: Path, cells: Path, corpus: dict[str, Path]
) -> None:
    other = make_corpus(tmp_path / "corpus", cells, seed=1)
    last = make_corpus(tmp_path / "last corpus", cells, seed=2)
    first = make_run(tmp_path / "runs" / "first", corpus)
    second = make_run(tmp_path / "runs" / "second", other, init_from=str(first))
    third = make_run(tmp_path / "runs" / "third", last, init_from=str(second))
    manifest = Manifest.read(other["manifest"])
    assert len(find_training_cells(third).manifests) == 3
    manifest.shard_path(manifest.splits["train"].index["hashes"]).unlink()
    found = find_training_cells(third)
    assert found.missing_ancestors == [str(second)]
    assert Manifest.read(corpus["manifest"]).fingerprint in found.manifests


def test_changed_shards_do_not_count_as_training_cells(
    tmp_path: Path, cells: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_config(make_run(tmp_path / "run", corpus), fingerprint="of other shards")
    run_predict(model, cells, tmp_path / "out.h5ad")
    assert f"({corpus['manifest']} is of other shards by now)" in capsys.readouterr().out


def test_a_damaged_manifest_is_not_one_of_other_shards(
    tmp_path: Path, cells: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tmp_path / "shards"
    shutil.copytree(corpus["manifest"].parent, shards)
    manifest = shards / "manifest.json"
    model = make_run(tmp_path / "run", {**corpus, "manifest": manifest})
    manifest.write_bytes(manifest.read_bytes()[:-100])
    run_predict(model, cells, tmp_path / "out.h5ad")
    shown = capsys.readouterr().out
    assert f"({manifest}: not valid JSON" in shown
    assert "of other shards" not in shown


def test_predictions_in_python_show_the_message_of_the_command(
    tmp_path: Path, cells: Path, corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run", corpus)
    written = run_predict(folder, cells, tmp_path / "out.h5ad", 0.6)
    said = [
        line.removeprefix("labelled: ")
        for line in capsys.readouterr().out.splitlines()
        if "accuracy" in line
    ]
    model = cellmill.load(folder)
    predicted = model.predict(ad.read_h5ad(cells), min_probability=0.6)
    counts = written.obs["cellmill_label"].value_counts()
    shown = ", ".join(f"'{label}' {n}" for label, n in counts[counts > 0].items())
    assert repr(predicted).splitlines() == [
        "Predictions",
        f"    600 cells, obs: {', '.join(predicted.obs)}",
        f"    cellmill_label: {shown}",
        f"    cellmill_rejected: {written.obs['cellmill_rejected'].sum()}",
        *(f"    {line}" for line in said),
    ]
    assert repr(model).splitlines() == [
        f"LoadedModel {folder}",
        "    encoder of 16 dimensions, 13,379 parameters, 400 genes (human)",
        "    labels: a, b",
    ]


def test_a_rejected_cell_has_no_label(
    tmp_path: Path, simulated: Path, corpus: dict[str, Path]
) -> None:
    """Also of a model with a class of that name: one text would stand for both."""
    model = export_classifier(tmp_path / "model", corpus["vocabulary"], "kind", ["unknown", "b"])
    found = run_predict(model, simulated, tmp_path / "out.h5ad", 0.6)
    rejected = found.obs["cellmill_probability"] < 0.6
    assert 0 < rejected.sum() < found.n_obs
    assert (found.obs["cellmill_rejected"] == rejected).all()
    assert (found.obs["cellmill_label"].isna() == rejected).all()
    best = np.array(["unknown", "b"])[np.asarray(found.obsm["cellmill_probabilities"]).argmax(1)]
    assert (found.obs["cellmill_label"][~rejected] == best[~rejected]).all()
    assert found.uns["cellmill_prediction"]["n_rejected"] == rejected.sum()
