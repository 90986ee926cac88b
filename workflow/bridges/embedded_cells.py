"""Embedded cells that stage `evaluate` scored, for the metrics of another package.

Bridges run in the interpreter of that package, so nothing of cellmill is imported: numpy, scipy, h5py, anndata and
scikit-learn are dependencies of every package here. The cells are those of evaluation task `integration`: scored, with
a label (and a batch, if there are several) and an embedding, of classes with FEWEST cells, a seeded draw of at most
MAX_CELLS. Beside the embedding stand 50 principal components of log(1 + counts per 10,000) of all genes, fitted on the
same cells.
"""

import argparse
import csv
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.sparse as sp
from anndata.io import read_elem, sparse_dataset
from bridge_result import write_rows
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors

KEY = "X_cellmill"  # key in obsm
FEWEST, MAX_CELLS, COMPONENTS = 10, 10_000, 50


@dataclass(frozen=True)
class EmbeddedCells:
    """The cells that are judged."""

    names: np.ndarray  # obs names; text
    labels: np.ndarray  # class of each cell; text
    batches: np.ndarray | None  # batch of each cell, text; None with fewer than two batches
    features: dict[str, np.ndarray]  # `embedding` and `PCA50`, `(cells, width)` float32
    dropped: dict[str, int]  # cells of each class with fewer than FEWEST


Measure = Callable[[np.ndarray, EmbeddedCells], dict[str, float]]
"""Metrics by name, of vectors `(cells, width)` of the cells."""


def parse_arguments() -> argparse.Namespace:
    """Arguments of the bridges that read an embedding."""
    parser = argparse.ArgumentParser()
    for name in ("cells", "embedding", "metrics", "umap", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--label", required=True)
    parser.add_argument("--batch", default="batch")
    return parser.parse_args()


def read_cells(given: argparse.Namespace) -> EmbeddedCells:
    """Cells of one dataset. Ends the process with one line if they have no label or one class."""
    dataset = given.cells.stem
    metrics = json.loads(given.metrics.read_text(encoding="utf-8"))
    scores_all = metrics["datasets"][dataset]["cells"] == "all"
    scored_names = _scored(given.umap, dataset, scores_all)
    with h5py.File(given.embedding) as file:
        obs, vectors = read_elem(file["obs"]), np.asarray(file["obsm"][KEY][:], np.float32)
    scored = np.flatnonzero(np.isin(np.asarray(obs.index, str), sorted(scored_names)))
    labels = _column(obs, given.label, given.embedding)[scored]
    kept, dropped = _choose(labels, metrics["options"]["seed"])
    batches = (
        _column(obs, given.batch, given.embedding)[scored[kept]] if given.batch in obs else None
    )
    if batches is not None and len({*batches} - {None}) > 1:
        known = np.array([batch is not None for batch in batches], bool)
        kept, batches = kept[known], batches[known].astype(str)
    else:
        batches = None
    labels = labels[kept].astype(str)
    if len(set(labels)) < 2:
        remedy = "" if scores_all else "raise shard.test_frac, or "
        sys.exit(
            f"cellmill: {dataset}: {len(set(labels))} classes of {given.label} have at least {FEWEST} scored cells, "
            f"expected two or more; {remedy}name another label in the table of datasets"
        )
    cells = scored[kept]
    features = {
        "embedding": vectors[cells],
        f"PCA{COMPONENTS}": principal_components(read_counts(given.cells, cells)),
    }
    return EmbeddedCells(np.asarray(obs.index, str)[cells], labels, batches, features, dropped)


def _scored(umap: Path, dataset: str, every: bool) -> set[str]:
    """obs names of the dataset in umap.tsv that were held out, or all of them."""
    with open(umap, newline="", encoding="utf-8") as file:
        lines = [
            line for line in csv.DictReader(file, delimiter="\t") if line["dataset"] == dataset
        ]
    if not lines:
        sys.exit(
            f"cellmill: {umap}: no cell of {dataset}, which the bridge would score; set evaluate.effort to full, as "
            "effort fast draws no UMAP"
        )
    return {line["obs_name"] for line in lines if every or line["heldout"] == "1"}


def _column(obs: Any, name: str, path: Path) -> np.ndarray:
    """An obs column as text, None for missing values; object `(cells,)`."""
    if name not in obs:
        sys.exit(
            f"cellmill: {path}: no obs column {name!r}; there are: {', '.join(map(str, obs.columns))}"
        )
    values = obs[name].astype(object)
    return np.array(
        [None if missing else str(value) for value, missing in zip(values, values.isna())], object
    )


def _choose(labels: np.ndarray, seed: int) -> tuple[np.ndarray, dict[str, int]]:
    """Indices of the labelled cells of classes with FEWEST cells, ascending, and the sizes of the other classes."""
    known = np.flatnonzero([label is not None for label in labels])
    if len(known) > MAX_CELLS:  # the draw of cellmill's own tasks
        generator = np.random.Generator(np.random.Philox(key=[seed, 0]))
        known = np.sort(generator.permutation(known)[:MAX_CELLS])
    names, number, counts = np.unique(
        labels[known].astype(str), return_inverse=True, return_counts=True
    )
    return known[counts[number] >= FEWEST], {
        str(n): int(c) for n, c in zip(names, counts) if c < FEWEST
    }


def read_counts(path: Path, cells: np.ndarray) -> sp.csr_matrix:
    """Counts of some cells (indices, ascending) of an .h5ad, `(cells, genes)`."""
    with h5py.File(path) as file:
        if "X" not in file:
            sys.exit(f"cellmill: {path}: expected cells with X; write them by `cellmill unpack`")
        stored = file["X"]
        return sp.csr_matrix(
            sparse_dataset(stored)[cells] if isinstance(stored, h5py.Group) else stored[cells]
        )


def principal_components(counts: sp.csr_matrix) -> np.ndarray:
    """COMPONENTS principal components of `log_normalise`, `(cells, components)` float32."""
    profiles = log_normalise(counts)
    n = max(1, min(COMPONENTS, *(size - 1 for size in profiles.shape)))
    return np.asarray(
        PCA(n, svd_solver="arpack", random_state=0).fit_transform(profiles), np.float32
    )


def log_normalise(counts: sp.csr_matrix) -> sp.csr_matrix:
    """log(1 + counts per 10,000), `(cells, genes)` float32."""
    counts = counts.astype(np.float32)
    totals = np.asarray(counts.sum(axis=1)).ravel()
    scaled = sp.diags_array(1e4 / np.maximum(totals, 1)) @ counts
    return sp.csr_matrix(scaled).log1p().astype(np.float32)


def neighbors_with_self(vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and distances of the k nearest cells, exact; each cell is its own first neighbour."""
    k = min(k, len(vectors))
    distances, indices = (
        NearestNeighbors(n_neighbors=max(k - 1, 1), algorithm="brute").fit(vectors).kneighbors()
    )
    own = np.arange(len(vectors))[:, None]
    return np.hstack([own, indices]), np.hstack([np.zeros((len(vectors), 1)), distances])


def judge(package: str, measure: Measure) -> None:
    """Measure each kind of features of the cells that the arguments name, and write the result: all of a bridge."""
    given = parse_arguments()
    cells = read_cells(given)
    write_result(
        given,
        package,
        cells,
        {name: measure(vectors, cells) for name, vectors in cells.features.items()},
    )


def write_result(
    given: argparse.Namespace,
    package: str,
    cells: EmbeddedCells,
    values: dict[str, dict[str, float]],
) -> None:
    """Write the values of each kind of features by metric to `--out`, and print them."""
    about = {
        "dataset": given.cells.stem,
        "label": given.label,
        "batch": None if cells.batches is None else given.batch,
        "n_cells": len(cells.names),
        "n_classes": len(set(cells.labels)),
        "dropped_classes": cells.dropped,
    }
    kinds = {name: "model" if name == "embedding" else "baseline" for name in values}
    write_rows(given.out, package, about, kinds, values)
