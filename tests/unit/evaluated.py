"""A simulated dataset under evaluation, with a small model of random weights."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from cellmill.config.evaluate import Evaluate
from cellmill.config.options import EmbedOptions, EvaluateOptions
from cellmill.data.inputs.formats import open_counts
from cellmill.data.shards.manifest import Manifest
from cellmill.evaluate.embed import load_for_inference
from cellmill.evaluate.task import Context, EvaluatedModel
from cellmill.stages import cells as on_cells
from cellmill.stages import evaluate as stage
from tests.unit.exported import export_model, make_corpus


def regression(sparse: bool) -> Any:
    """scikit-learn's logistic regression at its optimum; that of sparse features has a penalty on the intercept."""
    newton = LogisticRegression(solver="newton-cg", max_iter=1000, tol=1e-6, fit_intercept=not sparse)
    ones = FunctionTransformer(lambda values: sp.hstack([values, np.ones((values.shape[0], 1))], format="csr"))
    return make_pipeline(ones, newton) if sparse else newton


def make_context(folder: Path, simulated: Path, **model_options: Any) -> Context:
    """Every second cell is scored, in 3 folds."""
    corpus = make_corpus(folder, simulated)
    exported = export_model(folder / "model", corpus["vocabulary"], **model_options)
    network, vocabulary, tokens, config = load_for_inference(exported)
    options = Evaluate.model_validate({"folds": 3, "seed": 4})
    model = EvaluatedModel(network, config, vocabulary, tokens, Manifest.read(corpus["manifest"]), options.seed)
    reader = open_counts(corpus["cells"])
    scored = np.arange(reader.n_obs) % 2 == 0
    vectors = np.zeros((reader.n_obs, 16), np.float32)
    return Context("simulated", reader, scored, vectors, {"label": reader.obs["cell_type"]}, model, options)


def make_evaluated(folder: Path, simulated: Path, **split: Any) -> dict[str, Path]:
    """Paths of a corpus (`make_corpus`), and of a `model` and its `embedding` of the cells."""
    corpus = make_corpus(folder, simulated, **split)
    corpus["model"] = export_model(folder / "model", corpus["vocabulary"])
    return corpus | {"embedding": embed(corpus["model"], corpus["cells"], folder / "embeddings" / "simulated.h5ad")}


def embed(model: Path, cells: Path, out: Path, append: bool = False, **section: Any) -> Path:
    """The embedding of `cells`, which stage embed writes to `out` with options of `section`."""
    options = EmbedOptions.model_validate({"embed": section})
    on_cells.embed(options=options, model=model, input=cells, counts="X", out=out, append=append)
    return out


def with_config(model: Path, **entries: Any) -> Path:
    """The folder `model`, with other entries in its config.json."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | entries))
    return model


def with_obs(files: Mapping[str, Path], folder: Path, name: str, **obs: Any) -> dict[str, Path]:
    """The same cells in the file `name` with other obs columns, and their embedding."""
    adata = ad.read_h5ad(files["cells"])
    for column, values in obs.items():
        adata.obs[column] = values
    cells = folder / f"{name}.h5ad"
    adata.write_h5ad(cells)
    return {**files, "cells": cells, "embedding": embed(files["model"], cells, folder / "embedded" / cells.name)}


def evaluate(
    files: Mapping[str, Any], out: Path, label: str = "cell_type", beside: Sequence[Path] = (), **options: Any
) -> dict[str, Any]:
    """metrics.json that stage evaluate writes to `out`, without the seconds of tasks, the only numbers that vary.

    `files` has model and manifest, and cells and embedding: one path each, or a list for several datasets.
    `beside` are files of stage embed_external.
    """
    cells, embeddings = (
        given if isinstance(given, list) else [given] for given in (files["cells"], files["embedding"])
    )
    tasks = {"probe": {"seeds": 1}, "reconstruct": {}}  # one seed: quicker
    stage.evaluate(
        options=EvaluateOptions.model_validate({"evaluate": {"tasks": tasks} | options}),
        model=files["model"],
        manifest=files["manifest"],
        cells=cells,
        embeddings=embeddings,
        labels=len(cells) * [label],
        out=out,
        external=beside,
    )
    metrics: dict[str, Any] = json.loads(out.read_text())
    for dataset in metrics["datasets"].values():
        for task in dataset["tasks"].values():
            assert task["figures"].pop("seconds") >= 0
    return metrics
