"""Tasks `low_depth` and `missing_genes`: classification of cells that lost counts, or most of their measured genes.

Each level degrades the counts of the scored cells, by binomial thinning or by keeping a random set of genes. In
stratified cross-validation, degraded cells are classified after training on cells degraded alike (matched), on whole
cells (shifted), or on whole cells and those of all levels together (trained on all levels), the remedy that needs no
model. Every kind of features gets the same folds, classifiers and degraded counts: the embedding; the same architecture
untrained; 50 principal components of the model's training cells; all genes. Intervals of differences are over cells and
repeats (`evaluate.scores`).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.model_selection import StratifiedKFold
from threadpoolctl import threadpool_limits

from cellmill.config.parts.tasks import LowDepthConfig, MissingGenesConfig
from cellmill.evaluate.baselines import BaselineCache
from cellmill.evaluate.features import Features, fit_all, read_rows
from cellmill.evaluate.labels import labelled_cells
from cellmill.evaluate.scores import Predictions, against_best, differences, table_rows
from cellmill.evaluate.task import Context, TaskResult

MAX_CELLS = 2_000  # cells used at most: each level is embedded and classified again
WHOLE = "whole"

Degrade = Callable[[sp.csr_matrix, np.random.Generator], sp.csr_matrix]
"""Counts `(cells, genes of the file)` and a generator -> fewer counts."""


def classify_degraded(
    context: Context, task: str, levels: Mapping[str, Degrade], neighbors: int, repeats: int
) -> TaskResult:
    """A row for each features and classifier; columns for whole cells and for each level and way of training.

    Repeats draw both folds and what is lost again.
    """
    if context.reader.ordered:
        kind = "ranks have no counts" if context.reader.ranked else "sequences have no counts or genes"
        return TaskResult(skipped=f"{kind} to lose")
    options = context.options
    chosen = labelled_cells(context, task, options.folds, "evaluate.folds", MAX_CELLS)
    if isinstance(chosen, TaskResult):
        return chosen
    features = Features(context)
    whole = read_rows(context.reader, np.isin(np.arange(context.reader.n_obs), chosen.cells))
    predictions = Predictions(chosen.labels, repeats)
    for repeat in range(repeats):
        generator = np.random.Generator(np.random.Philox(key=[options.seed, 1000 + repeat]))
        cells = {WHOLE: features.of(whole)}
        cells |= {name: features.of(degrade(whole, generator)) for name, degrade in levels.items()}
        splitter = StratifiedKFold(options.folds, shuffle=True, random_state=options.seed + repeat)
        with threadpool_limits(1):  # small problems: threads cost more than they save
            for train, test in splitter.split(np.zeros(len(chosen.labels)), chosen.labels):
                for column, name, predicted in _fold(cells, chosen.labels, train, test, neighbors, context.baselines):
                    predictions.record(column, name, repeat, test, predicted)
    columns = predictions.accuracies()
    figures = chosen.figures | {"folds": options.folds, "repeats": repeats, "neighbors": neighbors}
    metric = f"{list(levels)[-1]}, shifted"
    return TaskResult(
        table_rows(columns), metric, against_best(columns), figures, differences=differences(columns)
    )  # fmt: skip


def _fold(
    cells: Mapping[str, Mapping[str, Any]],
    labels: np.ndarray,
    train: np.ndarray,
    test: np.ndarray,
    neighbors: int,
    baselines: BaselineCache,
) -> Iterator[tuple[str, str, np.ndarray]]:
    """(column, features and classifier, predicted classes) of one fold."""
    seen = {level: {kind: values[train] for kind, values in features.items()} for level, features in cells.items()}
    fitted = {level: fit_all(features, labels[train], neighbors, baselines) for level, features in seen.items()}
    together = {kind: _stacked([features[kind] for features in seen.values()]) for kind in seen[WHOLE]}
    on_all = fit_all(together, np.tile(labels[train], len(cells)), neighbors, baselines)
    for name in on_all:
        kind = name.partition(" + ")[0]
        yield WHOLE, name, fitted[WHOLE][name].predict(cells[WHOLE][kind][test])
        for level in (level for level in cells if level != WHOLE):
            tested = cells[level][kind][test]
            yield f"{level}, matched", name, fitted[level][name].predict(tested)
            yield f"{level}, shifted", name, fitted[WHOLE][name].predict(tested)
            yield f"{level}, trained on all levels", name, on_all[name].predict(tested)


def _stacked(features: list[Any]) -> Any:
    return sp.vstack(features, format="csr") if sp.issparse(features[0]) else np.concatenate(features)


class LowDepth:
    def __init__(self, config: LowDepthConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Accuracy at each depth, matched and shifted; see `classify_degraded`."""
        levels = {f"{100 * frac:g} % of counts": partial(thin, frac) for frac in self.config.count_fracs}
        return classify_degraded(context, "low_depth", levels, self.config.neighbors, self.config.repeats)


def thin(frac: float, counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
    """Keep each count with probability `frac`."""
    kept = generator.binomial(counts.data, frac).astype(counts.dtype)
    thinned = sp.csr_matrix((kept, counts.indices.copy(), counts.indptr.copy()), shape=counts.shape)
    thinned.eliminate_zeros()
    return thinned


class MissingGenes:
    def __init__(self, config: MissingGenesConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Accuracy with each number of genes, matched and shifted; see `classify_degraded`."""
        levels = {f"{n:,} genes": partial(keep_genes, n) for n in self.config.genes}
        return classify_degraded(context, "missing_genes", levels, self.config.neighbors, self.config.repeats)


def keep_genes(n: int, counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
    """Keep the counts of `n` genes, the same for all cells, drawn from those with any count."""
    expressed = np.unique(counts.indices)
    kept = np.zeros(counts.shape[1], bool)
    kept[generator.permutation(expressed)[:n]] = True
    few = sp.csr_matrix((counts.data * kept[counts.indices], counts.indices.copy(), counts.indptr.copy()), counts.shape)
    few.eliminate_zeros()
    return few
