"""A run that starts from a published folder: planned without torch, imported, trained, and used for
predictions.
"""

import json
import os
import pickle
import re
import shutil
import subprocess
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import cellmill
from cellmill.cli import main
from cellmill.config.published import PublishedFolder
from cellmill.data.genes.names import map_genes
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.stages import data as demo_stage
from tests.unit.published import geneformer_folder, scgpt_folder
from tests.workflow.conftest import REPOSITORY, Project, jobs_in

GENES = [f"ENSG{i:011d}" for i in range(1, 41)]
KINDS = ("geneformer", "scgpt")
EXAMPLE = "config/examples/published-to-predictions.yaml"


def _line(project: Project, parent: str, **changed: object) -> str:
    """The refusal of a dry run of a run that starts from `parent`."""
    run = {"corpus": "sim", "init_from": parent} | changed
    config = project.write_config("parent.yaml", runs={"tuned": run})
    done = project.snakemake(
        "--dry-run", "--configfile", config, "--", "results/runs/tuned/train/status.json"
    )
    assert done.returncode != 0
    [line] = [line for line in done.stdout.splitlines() if line.startswith("cellmill: ")]
    return line.removeprefix("cellmill: ")


def test_a_dry_run_imports_the_folder_without_torch(project: Project, tmp_path: Path) -> None:
    geneformer_folder(project.folder / "given" / "a b", GENES, "V2")
    tuned = {
        "corpus": "sim",
        "init_from": "geneformer:given/a b",
        "objective": {"name": "masked_gene"},
    }
    other = tuned | {"objective": {"name": "masked_gene", "mask_frac": 0.3}}
    medians = {"medians": "geneformer:given/a b"}
    config = project.write_config(
        "parent.yaml", runs={"tuned": tuned, "other": other}, vocabulary=medians
    )
    (tmp_path / "torch.py").write_text("raise ImportError('a dry run imports no torch')\n")
    targets = [f"results/runs/{name}/train/status.json" for name in ("tuned", "other")]
    words = project.command("--dry-run", "--printshellcmds", "--configfile", config, "--", *targets)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    shown = subprocess.run(
        words, cwd=project.folder, env=environment, capture_output=True, text=True, check=True
    )
    assert jobs_in(shown.stdout + shown.stderr) == {
        **dict.fromkeys(["preprocess", "vocabulary", "shard", "import"], 1),
        **dict.fromkeys(["plan", "train"], 2),
    }
    model = PublishedFolder("geneformer", Path("given/a b")).model
    assert re.fullmatch(r"results/published/geneformer-a_b-[0-9a-f]{8}", model)
    said = shown.stdout + shown.stderr
    assert f"    input: results/corpora/sim/cells/sim.h5ad, {model}/vocabulary.tsv\n" in said
    assert f"cellmill import geneformer 'given/a b' --out {model} " in said
    assert len(re.findall(rf"cellmill train .* --init-from {model} ", said)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_missing_files_are_reported_by_a_dry_run(kind: str, project: Project) -> None:
    folder = project.folder / "given"
    parent = f"{kind}:given"
    start = "runs.tuned.init_from: given"
    assert (
        _line(project, parent)
        == f"{start}: no such folder; give the folder with the published files"
    )
    if kind == "geneformer":
        geneformer_folder(folder, GENES)
        weights = "pytorch_model.bin"
        names = "model.safetensors or pytorch_model.bin"
    else:
        scgpt_folder(folder, ["GAPDH", "CD3D"])
        weights = "best_model.pt"
        names = "best_model.pt or model.safetensors"
    (folder / weights).rename(folder / "elsewhere")
    objective = {"objective": {"name": "masked_gene" if kind == "geneformer" else "masked_value"}}
    assert _line(project, parent, **objective) == (
        f"{start}: expected one {names}, got none; copy the one of these weights there"
    )
    (folder / "elsewhere").rename(folder / weights)
    family = "bert" if kind == "geneformer" else "scgpt"
    assert _line(project, parent, model={"family": family, "hidden": 32}, **objective) == (
        "config/parent.yaml + config/config.yaml: runs.tuned: model.hidden is 32, the model to start from "
        f"({parent}) has 16; make them equal"
    )
    if kind == "geneformer":
        assert _line(
            project, parent, tokens={"tokenizer": "rank", "max_tokens": 16}, **objective
        ) == (
            "config/parent.yaml + config/config.yaml: runs.tuned: tokens.max_tokens is 16, the model to start from "
            f"({parent}) has 32; make them equal"
        )
        (folder / "token_dictionary_other.pkl").write_bytes(pickle.dumps({}))
        assert _line(project, parent, **objective) == (
            f"{start}: expected one token_dictionary*.pkl, got token_dictionary_gc.pkl, token_dictionary_other.pkl; "
            "copy the one of these weights there"
        )
    shutil.rmtree(folder)
    folder.mkdir()
    for name in ("vocabulary.tsv", "model.safetensors"):
        (folder / name).write_text("content")
    with pytest.raises(
        DataError, match=r"given: this is a model folder of cellmill already; use it as it is$"
    ):
        PublishedFolder(kind, folder).files()


@pytest.mark.full
def test_the_example_predicts_from_published_folders(
    tmp_path: Path,
) -> None:
    project, command = make_example(tmp_path)
    command += ["results/report/index.html", *products(*KINDS)]
    project.ran(*command)
    for kind in KINDS:
        check_run(project.folder, kind)
    page = (project.folder / "results/report/index.html").read_text()
    assert all(
        name in page
        for name in (
            "PCA50",
            "all genes",
            *KINDS,
            "as-published (unknown: may have seen these cells) + kNN",
        )
    )
    assert project.jobs(*command) == {}
    weights = project.folder / "published" / "scgpt" / "best_model.pt"
    changed = torch.load(weights, weights_only=True)
    torch.save({name: tensor * 1.01 for name, tensor in changed.items()}, weights)
    again = [
        "import",
        "vocabulary",
        "shard",
        "plan",
        "train",
        "consolidate",
        "embed",
        "predict",
        "evaluate",
        "report",
    ]
    assert project.jobs(*command) == dict.fromkeys([*again, "embed_external"], 1)


def products(*kinds: str) -> list[str]:
    """Files that `check_run` reads of the runs of these kinds."""
    names = ("evaluate/metrics.json", "predictions/query.h5ad")
    return [f"results/runs/{kind}/{name}" for kind in kinds for name in names]


def make_example(folder: Path) -> tuple[Project, list[str]]:
    """The example's project with the demo's cells and two small published folders, and the words of
    its command, before the files to make.
    """
    try:
        demo_stage.demo(out=folder / "data" / "demo" / "pbmc68k.h5ad")
    except DataError as error:  # no scanpy, with which these cells come: an extra
        pytest.skip(str(error))
    cells = ad.read_h5ad(folder / "data" / "demo" / "pbmc68k.h5ad")
    genes = sorted(
        {gene for gene in map_genes(list(cells.var_names), cells.var, "human").gene_ids if gene}
    )
    geneformer_folder(folder / "published" / "geneformer", genes[:-5], "V2", positions=96)
    scgpt_folder(folder / "published" / "scgpt", list(cells.var_names)[:-5])
    shutil.copytree(REPOSITORY / "config" / "examples", folder / "config" / "examples")
    return Project(folder), ["--configfile", EXAMPLE, "--replace-workflow-config"]


def check_run(folder: Path, kind: str) -> None:
    """Check that a run of the example continues from its published folder, and that its predictions
    are its model's.
    """
    published = PublishedFolder(kind, Path("published") / kind)
    run = folder / "results" / "runs" / kind
    imported = folder / published.model
    assert (
        main(
            [
                "import",
                kind,
                str(folder / published.folder),
                "--out",
                str(folder / "by hand" / kind),
            ]
        )
        == 0
    )
    by_hand, first = (
        load_file(path / "model.safetensors") for path in (folder / "by hand" / kind, imported)
    )
    assert all(torch.equal(by_hand[name], tensor) for name, tensor in first.items())
    config, trained = (
        json.loads((path / "config.json").read_text()) for path in (imported, run / "model")
    )
    assert config["model"] | {"embed_layer": 0} == trained["model"]
    assert config["tokens"] == trained["tokens"]
    weights = load_file(run / "model" / "model.safetensors")
    moved = {
        float((weights[name] - first[name]).abs().max())
        for name in first
        if name.startswith("blocks.")
    }
    assert 0 < max(moved) < 0.1  # from the published weights, not from others
    theirs, ours = (
        Vocabulary.read(path / "vocabulary.tsv")
        for path in (imported, folder / "results" / "corpora" / kind)
    )
    rows = theirs.rows_of(ours.gene_ids)
    assert (rows < 0).sum() == 5
    np.testing.assert_array_equal(ours.medians[rows >= 0], theirs.medians[rows[rows >= 0]])
    found = ad.read_h5ad(run / "predictions" / "query.h5ad")
    query = cellmill.open_cells(folder / "results" / "corpora" / kind / "cells" / "query.h5ad")
    predicted = cellmill.load(run / "model").predict(query)
    np.testing.assert_array_equal(found.obs["cellmill_label"], predicted.labels)
    rows = json.loads((run / "evaluate" / "metrics.json").read_text())["datasets"]["labelled"][
        "tasks"
    ]["probe"]["rows"]
    assert {row["method"]["kind"] for row in rows} >= {"model", "baseline"}
    beside = {row["method"]["features"] for row in rows if row["method"]["kind"] == "external"}
    assert beside == {"external: as-published (unknown: may have seen these cells)"}
    [made] = (folder / "results" / "corpora" / kind / "external" / "as-published").glob(
        "labelled-*.h5ad"
    )
    labelled = cellmill.open_cells(
        folder / "results" / "corpora" / kind / "cells" / "labelled.h5ad"
    )
    as_published = cellmill.load(folder / "by hand" / kind).embed(labelled)
    np.testing.assert_allclose(
        ad.read_h5ad(made).obsm["X_cellmill"], as_published, rtol=0, atol=1e-5
    )
