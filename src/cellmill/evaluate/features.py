"""Labelled cells, features made from their counts alone (the embedding and the baselines), and
classifiers on them.

Logistic regression runs on both standardised and unchanged features: standardising raises the
weight of small principal components, which helps or hurts depending on the number of cells.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import numpy as np
import pandas as pd
import scipy.sparse as sp
from sklearn import config_context
from sklearn.utils.extmath import row_norms
from sklearn.utils.sparsefuncs import mean_variance_axis
from threadpoolctl import ThreadpoolController

from cellmill.config.plugin import load
from cellmill.data.arrays import log_normalise, select_columns, summed, text_values
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.stream.batch import Batch
from cellmill.errors import DataError
from cellmill.evaluate.baselines import CachedClassifiers
from cellmill.evaluate.embed import embed_batches, tokens_of
from cellmill.evaluate.logistic import LogisticRegression
from cellmill.evaluate.predict import tally
from cellmill.evaluate.scores import EMBEDDING, EXTERNAL, UNTRAINED, draw_cells, seeded
from cellmill.evaluate.task import COMPONENTS, TOKEN_BUDGET, Context, Skipped, pca
from cellmill.models.family import Model

ALL_GENES = "all genes"
# features that no other run has, and beginnings of the names of others
OF_THE_MODEL = (EMBEDDING, UNTRAINED)
OF_TRAINING = f"PCA{COMPONENTS} of the training cells"
REGRESSION = "logistic regression"
RANKED = "rank-z genes, ANOVA"
RANKED_GENES = 500
VARIABLE_GENES = 2000
BINS = 20
ROW_BLOCK = 4096  # cells read at once
COMPARED = 512  # cells compared with all fitted ones at once
SHOWN_CLASSES = 8  # in a line of the log
# all-genes regression over more takes hours and moves accuracy by less than 0.01
MAX_CELLS = 10_000
_libraries = cache(ThreadpoolController)  # finding them takes longer than many a fit


def cell_features(
    context: Context, cells: np.ndarray, embedding: np.ndarray | None = None
) -> dict[str, Any]:
    """Features of the cells with these indices, ascending, with the embeddings by models of other
    packages.
    """
    return with_external(
        features_of_counts(context, read_rows(context.reader, cells), embedding), context, cells
    )


def with_external(features: dict[str, Any], context: Context, cells: np.ndarray) -> dict[str, Any]:
    """The features, with the embeddings of `cells` (indices) by models of other packages."""
    return features | {
        f"{EXTERNAL}{name}": vectors[cells] for name, vectors in context.external.items()
    }


def features_of_counts(
    context: Context, counts: sp.csr_matrix, embedding: np.ndarray | None = None
) -> dict[str, Any]:
    """Features by name, `(cells, width)`; only those of all genes are sparse. A known `embedding`
    is taken.
    """
    model = context.model
    columns = context.columns
    profiles = summed(counts) if columns.ordered else counts
    known = log_normalise(select_columns(profiles, columns.target, model.vocabulary.n_genes))
    return {
        EMBEDDING: embed_counts(context, counts, model.network) if embedding is None else embedding,
        UNTRAINED: embed_counts(context, counts, model.untrained),
        OF_TRAINING: model.components.transform(known),
        ALL_GENES: log_normalise(profiles),
    }


def tokens_of_counts(context: Context, counts: sp.csr_matrix) -> Iterator[Batch]:
    """Tokens of the cells; those without a known gene are left out."""
    return tokens_of([counts], context.columns, context.model.vocabulary, context.model.tokens)


def embed_counts(
    context: Context, counts: sp.csr_matrix, network: Model, tokens: Iterable[Batch] | None = None
) -> np.ndarray:
    """Vectors of the cells, or of other `tokens` of theirs, `(cells, hidden)` float32; zeros for
    cells without any.
    """
    batches = tokens_of_counts(context, counts) if tokens is None else tokens
    return np.nan_to_num(
        embed_batches(batches, network, counts.shape[0], TOKEN_BUDGET, context.options.precision)
    )


def own_components(profiles: sp.csr_matrix) -> np.ndarray:
    """Principal components fitted on the cells themselves, `(cells, components)`."""
    return np.asarray(pca(profiles.shape).fit_transform(profiles))


def variable_genes(profiles: sp.csr_matrix) -> np.ndarray:
    """The VARIABLE_GENES most variable genes, ascending: scanpy's highly_variable_genes of flavor
    seurat.

    Variance over mean of counts per 10,000, its logarithm standardised over the genes of like
    means.
    """
    mean, variance = mean_variance_axis(profiles.expm1().astype(np.float64), axis=0)
    varying = np.flatnonzero(variance > 0)
    dispersion = pd.Series(np.log(variance[varying] / mean[varying]))
    of_bin = dispersion.groupby(pd.cut(np.log1p(mean[varying]), BINS, labels=False))
    # of a gene alone in its bin
    scores = ((dispersion - of_bin.transform("mean")) / of_bin.transform("std")).fillna(1)
    return np.sort(varying[np.argsort(-scores.to_numpy(), kind="stable")[:VARIABLE_GENES]])


class RankedGenes:
    """Genes of each cell by the rank of their log counts, standardised within the cell; equal
    values share a rank.

    Kept as the value of the genes without a count, `zero`, `(cells,)`, and what others have `above`
    it, sparse.
    """

    def __init__(self, genes: sp.csr_matrix) -> None:
        self.above = genes.astype(np.float64)
        self.above.eliminate_zeros()
        (n, width), expressed = genes.shape, np.diff(self.above.indptr)
        cell = np.repeat(np.arange(n), expressed)
        absent = width - expressed
        middle = (width + 1) / 2
        ranks = absent[cell] + pd.Series(self.above.data).groupby(cell).rank().to_numpy()
        lowest = (absent + 1) / 2
        variance = (np.bincount(cell, ranks**2, n) + absent * lowest**2) / width - middle**2
        # of a cell whose values are all equal, 1
        scale = np.sqrt(np.where(variance > 1e-9 * middle**2, variance, 1))
        self.zero, self.above.data = (lowest - middle) / scale, (ranks - lowest[cell]) / scale[cell]

    def select(self, cells: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Of all cells, the RANKED_GENES of largest F between the `labels` of some `cells`, in
        their order: dense.
        """
        of_class = np.unique(labels, return_inverse=True)[1]
        member = np.eye(of_class.max() + 1)[of_class].T
        above = self.above[cells]
        zero = self.zero[cells]
        sums = member @ above + (member @ zero)[:, None]
        squares = above.power(2).sum(0) + 2 * (zero @ above) + zero @ zero
        of_classes = (sums**2 / member.sum(1)[:, None]).sum(0)
        between = of_classes - sums.sum(0) ** 2 / len(cells)
        f = between / np.maximum(np.asarray(squares).ravel() - of_classes, 1e-9)  # but for a factor
        chosen = np.sort(np.argsort(-f, kind="stable")[:RANKED_GENES])
        return np.asarray(self.above[:, chosen].toarray() + self.zero[:, None])


class NearestCells:
    """Predicts the most frequent class of the nearest fitted cells, by Euclidean distance; of equal
    ones the first.
    """

    def __init__(self, neighbors: int) -> None:
        self.neighbors = neighbors

    def __repr__(self) -> str:
        return f"NearestCells({self.neighbors})"

    def fit(self, features: Any, labels: np.ndarray) -> Self:
        """Keep `features`, `(cells, width)`, dense or sparse, and `labels`, `(cells,)`."""
        self.classes, of_cell = np.unique(labels, return_inverse=True)
        self._votes = np.eye(len(self.classes))[of_cell]
        values = features.astype(np.float64)
        self._squares = row_norms(values, squared=True)
        self._columns = values.T.tocsr() if sp.issparse(values) else values.T
        return self

    def predict(self, features: Any) -> np.ndarray:
        """The class of each cell, `(cells,)`, of features `(cells, width)`."""
        found = []
        for first in range(0, features.shape[0], COMPARED):
            products = features[first : first + COMPARED].astype(np.float64) @ self._columns
            # squared distances but for the square of the cell itself
            apart = self._squares - 2 * (products.toarray() if sp.issparse(products) else products)
            nearest = apart.argpartition(self.neighbors - 1, axis=1)[:, : self.neighbors]
            found.append(self._votes[nearest].sum(1).argmax(1))
        return self.classes[np.concatenate(found)]


def classifiers(neighbors: int, installed: Iterable[str] = ()) -> dict[str, Any]:
    """Unfitted classifiers by name, and the classifiers of installed packages."""
    return {
        REGRESSION: LogisticRegression(standardised=True),
        "logistic regression, unscaled": LogisticRegression(standardised=False),
        "kNN": NearestCells(neighbors),
        **{name: load("classifier", name)() for name in installed},
    }


@contextmanager
def small_problems() -> Iterator[None]:
    """Fit and predict inside without threads and scikit-learn's checks: they would take longer than
    the work.
    """
    with (
        _libraries().limit(limits=1),
        config_context(assume_finite=True, skip_parameter_validation=True),
    ):
        yield


def rows_of(features: Mapping[str, Any], cells: np.ndarray) -> dict[str, Any]:
    """The features of some of the cells."""
    return {name: values[cells] for name, values in features.items()}


def fit_all(
    features: Mapping[str, Any], labels: np.ndarray, neighbors: int, context: Context
) -> dict[str, CachedClassifiers]:
    """Classifiers by kind of features; `features` are `(cells, width)` each, dense or sparse.

    With a classifier of another package, whose code may change, no prediction is saved. Genes by
    rank have the standardised regression alone.
    """
    baselines = context.baselines
    most = min(neighbors, len(labels))
    installed = context.options.classifiers
    return {
        kind: CachedClassifiers(
            baselines.of_model if kind.startswith(OF_THE_MODEL) or installed else baselines.known,
            {
                name: one
                for name, one in classifiers(most, installed).items()
                if kind != RANKED or name == REGRESSION
            },
            values,
            labels,
        )
        for kind, values in features.items()
    }


def predict_all(
    fitted: Mapping[str, CachedClassifiers], features: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Predicted classes, text `(cells,)`, by `features + classifier`, each from its own kind of
    features.
    """
    return {
        f"{kind} + {name}": classes
        for kind, of_kind in fitted.items()
        for name, classes in of_kind.predict(features[kind]).items()
    }


def keep_columns(counts: sp.csr_matrix, kept: np.ndarray) -> sp.csr_matrix:
    """Counts without those of the columns where `kept`, bool `(columns,)`, is False; the shape
    stays.
    """
    few = counts.copy()
    few.data = counts.data * kept[counts.indices].astype(counts.dtype)
    few.eliminate_zeros()
    return few


def read_rows(reader: CountsReader, cells: np.ndarray) -> sp.csr_matrix:
    """Counts of the cells with these indices, in the order of the file."""
    mask = np.isin(np.arange(reader.n_obs), cells)
    blocks = []
    first = 0
    for block in reader.rows(ROW_BLOCK):
        blocks.append(block[np.flatnonzero(mask[first : first + block.shape[0]])])
        first += block.shape[0]
    return sp.vstack(blocks, format="csr")


def halves(context: Context) -> np.ndarray:
    """Label of each cell, text `(n_obs,)`, by all genes' regression on the labels of the other
    half; "" for none.

    Evaluated cells of labels with at least `folds` cells are divided into two stratified halves.
    """
    column = context.roles["label"]
    seed = context.options.seed
    scored = np.flatnonzero(context.scored)
    chosen = choose_cells(column.iloc[scored], context.options.folds, seed)
    cells = scored[chosen.cells]
    labels = chosen.labels
    found = np.full(context.reader.n_obs, "", dtype=labels.dtype)
    if len(chosen.classes) < 2:
        return found
    counts = read_rows(context.reader, cells)
    genes = log_normalise(summed(counts) if context.columns.ordered else counts)
    order = seeded(seed, 6).permutation(len(labels))
    half = np.ones(len(labels), bool)
    classifier = {REGRESSION: LogisticRegression(standardised=True)}
    half[order[np.argsort(labels[order], kind="stable")][1::2]] = False
    with small_problems():
        for tested in (half, ~half):
            fitted = CachedClassifiers(
                context.baselines.known, classifier, genes[~tested], labels[~tested]
            )
            found[cells[tested]] = fitted.predict(genes[tested])[REGRESSION]
    return found


@dataclass(frozen=True)
class Labelled:
    cells: np.ndarray  # their indices, ascending; int64
    labels: np.ndarray  # class of each; text
    classes: dict[str, int]  # cells of each class used, the largest first
    dropped: dict[str, int]  # cells of each class left out for having fewer cells than are needed
    n_unlabelled: int  # cells without a label, left out
    n_left_out: int  # cells beyond the most, left out by a seeded draw

    @property
    def numbers(self) -> dict[str, Any]:
        """Numbers of cells, for metrics.json."""
        used = {
            "n_cells": len(self.cells),
            "classes": self.classes,
            "dropped_classes": self.dropped,
        }
        return used | {"n_unlabelled": self.n_unlabelled, "n_left_out": self.n_left_out}


def labelled_cells(
    context: Context, task: str, fewest: int, needed_by: str, max_cells: int = MAX_CELLS
) -> Labelled:
    """Evaluated cells of classes with at least `fewest` cells, which are printed.

    `needed_by` is the option that needs so many cells. Raises Skipped for fewer than two such
    classes, and DataError for a column of one class.
    """
    if "label" not in context.roles:
        raise Skipped("the dataset has no label column")
    column = context.roles["label"]
    values = sorted({*text_values(column.dropna())})
    if not values:
        raise Skipped(f"no cell has a label in obs column {column.name!r}")
    if len(values) < 2:
        raise DataError(
            f"{context.reader.path}: obs column {column.name!r} has one class, {values[0]!r}; expected two classes or "
            f"more for task {task}: name another label column, or leave it empty"
        )
    scored = np.flatnonzero(context.scored)
    chosen = choose_cells(column.iloc[scored], fewest, context.options.seed, max_cells)
    for heading, classes in (
        (column.name, chosen.classes),
        (f"left out, fewer than {fewest} cells", chosen.dropped),
    ):
        if classes or heading == column.name:
            print(f"{context.dataset}: {task}: {heading}: {_listed(classes)}", flush=True)
    n = len(chosen.classes)
    if n < 2:
        raise Skipped(
            f"{n} classes of {column.name} have at least {fewest} scored cells ({needed_by}), expected two or more; "
            f"raise shard.test_frac or lower {needed_by}",
            chosen.numbers,
        )
    return replace(chosen, cells=scored[chosen.cells])


def _listed(classes: dict[str, int]) -> str:
    """The largest classes with their cells, and how many more there are."""
    if not classes:
        return "no class"
    shown = ", ".join(f"{name} {n:,}" for name, n in [*classes.items()][:SHOWN_CLASSES])
    others = [*classes.values()][SHOWN_CLASSES:]
    return shown + (
        f" and {len(others):,} more classes with {sum(others):,} cells" if others else ""
    )


def choose_cells(labels: pd.Series, fewest: int, seed: int, max_cells: int = MAX_CELLS) -> Labelled:
    """The labelled cells of classes with at least `fewest` cells."""
    text = text_values(labels)
    missing = labels.isna().to_numpy()
    known = np.flatnonzero(~missing)
    drawn = draw_cells(known, max_cells, seed, 0)
    counts = tally(text[drawn])
    kept = np.array([cell for cell in drawn if counts[text[cell]] >= fewest], dtype=np.int64)
    return Labelled(
        cells=kept,
        labels=text[kept].astype(str),
        classes={name: n for name, n in counts.items() if n >= fewest},
        dropped={name: n for name, n in counts.items() if n < fewest},
        n_unlabelled=int(missing.sum()),
        n_left_out=len(known) - len(drawn),
    )
