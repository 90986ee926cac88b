"""Imported models on the demo's cells: they embed, evaluate, and start a run, by the commands of the README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import yaml

from cellmill.cli import main
from cellmill.commands.exchange import import_model
from cellmill.data.genes.names import map_genes
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.models.build import ModelSpec, build
from cellmill.models.export import initial_tensors, load_model, spec_of
from cellmill.stages import data as demo_stage
from tests.tiers import quick
from tests.unit.published import geneformer_folder, scgpt_folder

KINDS = ("geneformer", "scgpt")
CONFIG: dict[str, Any] = {
    "runs": {"a": {"corpus": "pbmc"}},
    "preprocess": {"min_genes": 5},
    "shard": {"test_frac": 0.3},
    "train": {"steps": 2, "global_batch": 16, "warmup_steps": 1},
    "evaluate": {"tasks": {"probe": {}, "reconstruct": {}}, "folds": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's cells, preprocessed, and both published folders with all but five of their genes, imported."""
    made = tmp_path_factory.mktemp("imported")
    try:
        demo_stage.demo(out=made / "pbmc.h5ad")
    except DataError as error:
        pytest.skip(str(error))
    data = ad.read_h5ad(made / "pbmc.h5ad")
    data.X = data.X.astype(np.float32)
    data = data[::5].copy()  # 140 cells: time
    data.write_h5ad(made / "pbmc.h5ad")
    genes = [gene for gene in map_genes(list(data.var_names), data.var, "human").gene_ids if gene]
    geneformer_folder(made / "published" / "geneformer", sorted(set(genes))[:-5], "V2", positions=96)
    scgpt_folder(made / "published" / "scgpt", list(data.var_names)[:-5])
    table = made / "datasets.tsv"
    table.write_text("dataset\tpath\npbmc\tpbmc.h5ad\n")
    (made / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"corpora": {"pbmc": {"table": str(table)}}}))
    _run(
        f"preprocess --input {made}/pbmc.h5ad --dataset pbmc --out {made}/cells/pbmc.h5ad --report {made}/qc.json "
        f"--config {made}/config.yaml --corpus pbmc"
    )
    for kind in KINDS:
        _run(f"import {kind} {made}/published/{kind} --out {made}/{kind}")
    return made


def _run(command: str) -> None:
    assert main(command.split()) == 0


@pytest.mark.parametrize("kind", quick(KINDS, KINDS[:1]))
def test_an_imported_model_embeds_the_demo_and_is_evaluated_on_it(kind: str, folder: Path, tmp_path: Path) -> None:
    model, cells, config = folder / kind, folder / "cells" / "pbmc.h5ad", f"--config {folder}/config.yaml"
    embedded = tmp_path / "embedded" / "pbmc.h5ad"
    _run(f"embed --model {model} --input {cells} --out {embedded}")
    vectors = np.asarray(ad.read_h5ad(embedded).obsm["X_cellmill"])
    assert vectors.shape == (ad.read_h5ad(cells).n_obs, 16)
    assert np.isfinite(vectors).all()
    if kind == "scgpt":  # time: the evaluation is the same code
        return
    manifest = tmp_path / "shards" / "manifest.json"
    _run(f"shard {config} --corpus pbmc --cells {cells} --vocabulary {model}/vocabulary.tsv --out {manifest}")
    _run(
        f"evaluate {config} --run a --model {model} --manifest {manifest} --cells {cells} --embeddings {embedded} "
        f"--labels bulk_labels --out {tmp_path}/metrics.json"
    )
    tasks = json.loads((tmp_path / "metrics.json").read_text())["datasets"]["pbmc"]["tasks"]
    assert tasks["probe"]["rows"]
    assert all(task["skipped"] is None for task in tasks.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_other_genes_starts_from_an_imported_model(kind: str, folder: Path) -> None:
    network, theirs, config = load_model(folder / kind)
    own = Vocabulary(
        [*theirs.gene_ids[100:200], "ENSG00000999999"],
        [*theirs.symbols[100:200], "new"],
        np.ones(101, np.int64),
        np.ones(101, np.float32),
    )
    objective = {"name": "cell_decoding", "view": "drop"}
    spec: ModelSpec = spec_of(config | {"objective": objective}, own.n_genes)
    made = dict(initial_tensors(build(spec), 0, folder / kind, own))
    before = network.state_dict()
    np.testing.assert_array_equal(made["gene_embedding.weight"][2:102], before["gene_embedding.weight"][102:202])
    for name in set(made) & set(before) - {"gene_embedding.weight", "profile_genes.weight", "profile_bias"}:
        np.testing.assert_array_equal(made[name], before[name], err_msg=name)
    assert "blocks.0.qkv.weight" in set(made) & set(before)


@pytest.mark.full
def test_an_imported_model_is_trained(folder: Path, tmp_path: Path) -> None:
    model, cells = folder / "geneformer", folder / "cells" / "pbmc.h5ad"
    train, manifest = tmp_path / "train", tmp_path / "shards" / "manifest.json"
    exported = json.loads((model / "config.json").read_text())
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config |= {section: exported[section] for section in ("model", "tokens", "objective")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    shared = f"--config {tmp_path}/config.yaml"
    genes = f"--vocabulary {model}/vocabulary.tsv"
    _run(f"shard {shared} --corpus pbmc --cells {cells} {genes} --out {manifest}")
    _run(f"train {shared} --run a --manifest {manifest} {genes} --init-from {model} --out {train}")
    _run(f"consolidate {shared} --run a --train {train} {genes} --out {tmp_path}/model")
    before, after = (load_model(path)[0].state_dict() for path in (model, tmp_path / "model"))
    assert before.keys() == after.keys()
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < moved < 0.01  # two steps of AdamW from the imported weights


@pytest.mark.parametrize("kind", ["geneformer", "scgpt"])
def test_a_folder_that_is_not_a_published_model_is_named(folder: Path, tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match=r"nothere: no such folder; give the folder with the published files$"):
        import_model(kind=kind, folder=tmp_path / "nothere", out=tmp_path / "out")
    with pytest.raises(DataError, match=r"geneformer: this is a model folder of cellmill already; embed with it"):
        import_model(kind=kind, folder=folder / "geneformer", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
