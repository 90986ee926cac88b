"""A simulated dataset under evaluation, with a small model of random weights."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from cellmill import open_cells
from cellmill.config.evaluate import Evaluate
from cellmill.config.options import EmbedOptions, EvaluateOptions, PreprocessOptions
from cellmill.data.inputs.formats import open_counts
from cellmill.data.shards.manifest import Manifest
from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.evaluate.inference.embed import load_for_inference
from cellmill.evaluate.task import Context
from cellmill.runs.results import ScoredMethod
from cellmill.stages import cells as on_cells
from cellmill.stages import data as on_data
from cellmill.stages import evaluate as stage
from tests.unit.exported import export_model, make_corpus

BRIDGES = Path(__file__).resolve().parents[2] / "workflow" / "bridges"


def named(by_method: Mapping[ScoredMethod, Any]) -> dict[str, Any]:
    """Values of methods by their names."""
    return {method.name: value for method, value in by_method.items()}


def regression(sparse: bool) -> Any:
    """scikit-learn's logistic regression at its optimum; that of sparse features has a penalty on
    the intercept.
    """
    newton = LogisticRegression(
        solver="newton-cg", max_iter=1000, tol=1e-6, fit_intercept=not sparse
    )
    ones = FunctionTransformer(
        lambda values: sp.hstack([values, np.ones((values.shape[0], 1))], format="csr")
    )
    return make_pipeline(ones, newton) if sparse else newton


def make_context(folder: Path, corpus: Mapping[str, Path], **model_options: Any) -> Context:
    """The cells of a corpus, by a small model that is exported to `folder`: every second is scored,
    in 3 folds.
    """
    exported = export_model(folder / "model", corpus["vocabulary"], **model_options)
    network, vocabulary, tokens, config = load_for_inference(exported)
    options = Evaluate.model_validate({"folds": 3, "seed": 4})
    model = EvaluatedModel(
        network, config, vocabulary, tokens, Manifest.read(corpus["manifest"]), options.seed
    )
    reader = open_counts(corpus["cells"])
    scored = np.arange(reader.n_obs) % 2 == 0
    vectors = np.zeros((reader.n_obs, 16), np.float32)
    return Context(
        "simulated", reader, scored, vectors, {"label": reader.obs["cell_type"]}, model, options
    )


def make_evaluated(folder: Path, simulated: Path, **split: Any) -> dict[str, Path]:
    """Paths of a corpus (`make_corpus`), and of a `model` and its `embedding` of the cells."""
    corpus = make_corpus(folder, simulated, **split)
    corpus["model"] = export_model(folder / "model", corpus["vocabulary"])
    return corpus | {
        "embedding": embed(
            corpus["model"], corpus["cells"], folder / "embeddings" / "simulated.h5ad"
        )
    }


def embed(model: Path, cells: Path, out: Path, append: bool = False, **section: Any) -> Path:
    """The embedding of `cells`, which stage embed writes to `out` with options of `section`."""
    options = EmbedOptions.model_validate({"embed": section})
    on_cells.embed(options=options, model=model, input=cells, counts="X", out=out, append=append)
    return out


def preprocessed(raw: Path, out: Path, **section: Any) -> Path:
    """The cells of `raw`, all of them, which stage preprocess writes to `out` with options of
    `section`.
    """
    options = PreprocessOptions.model_validate(
        {"preprocess": {"min_genes": 0, "max_mito_frac": 1} | section}
    )
    report = out.with_suffix(".json")
    on_data.preprocess(
        options=options, input=raw, counts="X", dataset=out.stem, out=out, report=report
    )
    return out


def run_bridge(package: str, script: str, out: Path, **given: Any) -> dict[str, dict[str, Any]]:
    """Values by row and metric that a bridge writes to `out`; skips without the package.

    Its interpreter is the one of CELLMILL_PACKAGE, such as CELLMILL_CELL_EVAL, or this one.
    """
    python = os.environ.get(f"CELLMILL_{package.upper().replace('-', '_')}", sys.executable)
    words = [
        python,
        str(BRIDGES / f"{script}.py"),
        *(f"--{name}={value}" for name, value in given.items()),
    ]
    # theirs are their own
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    done = subprocess.run([*words, f"--out={out}"], capture_output=True, text=True, env=environment)
    if f"{package} cannot be imported" in done.stderr:
        pytest.skip(f"{package} is not installed in {python}")
    assert done.returncode == 0, done.stderr
    values: dict[str, dict[str, Any]] = {}
    for row in json.loads(out.read_text())["rows"]:
        values.setdefault(row["name"], {})[row["metric"]] = row["value"]
    return values


def with_config(model: Path, **entries: Any) -> Path:
    """The folder `model`, with other entries in its config.json."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | entries))
    return model


def export_classifier(
    folder: Path, genes: Path, column: str, labels: list[str], **entry: Any
) -> Path:
    """The folder of a model that predicts `labels` of an obs column, with `entry` beside them in
    its config.json.
    """
    levels = {column: (*labels, "<missing>")}
    model = export_model(
        folder, genes, seed=1, levels=levels, objective="classification", label_column=column
    )
    classifier = {"label_column": column, "labels": labels, "calibration": None}
    return with_config(model, classifier=classifier | entry)


def with_obs(files: Mapping[str, Path], folder: Path, name: str, **obs: Any) -> dict[str, Path]:
    """The same cells in the file `name` with other obs columns, and their embedding."""
    adata = open_cells(files["cells"])
    for column, values in obs.items():
        adata.obs[column] = values
    cells = folder / f"{name}.h5ad"
    adata.write_h5ad(cells)
    return {
        **files,
        "cells": cells,
        "embedding": embed(files["model"], cells, folder / "embedded" / cells.name),
    }


def evaluate(
    files: Mapping[str, Any],
    out: Path,
    label: str = "cell_type",
    beside: Sequence[Path] = (),
    **options: Any,
) -> dict[str, Any]:
    """metrics.json that stage evaluate writes to `out`, without the seconds of tasks, the only
    numbers that vary.

    `files` has model and manifest, cells and embedding, one path each or a list for several
    datasets, and perhaps baselines. `beside` are files of stage embed_external.
    """
    cells, embeddings = (
        given if isinstance(given, list) else [given]
        for given in (files["cells"], files["embedding"])
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
        baselines=files.get("baselines"),
    )
    metrics: dict[str, Any] = json.loads(out.read_text())
    for dataset in metrics["datasets"].values():
        for task in dataset["tasks"].values():
            assert task["figures"].pop("seconds") >= 0
    return metrics
