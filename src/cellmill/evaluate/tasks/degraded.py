"""Tasks `low_depth` and `missing_genes`: classification of cells that lost counts, or most of their measured genes.

Each level degrades the counts of the scored cells, by binomial thinning or by keeping a random set of genes. In
stratified cross-validation, degraded cells are classified after training on cells degraded alike (matched), on whole
cells (shifted), or on whole cells and those of all levels together (trained on all levels), the remedy that needs no
model. All features and classifiers (`evaluate.tasks.classify`) get the same folds and degraded counts.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import scipy.sparse as sp

from cellmill.config.parts.tasks import DegradedConfig, LowDepthConfig, MissingGenesConfig
from cellmill.evaluate.features import (
    features_of_counts,
    fit_all,
    halves,
    keep_columns,
    labelled_cells,
    predict_all,
    read_rows,
    rows_of,
    small_problems,
    stacked,
)
from cellmill.evaluate.scores import Predictions
from cellmill.evaluate.task import Context, Task, TaskResult
from cellmill.evaluate.tasks.classify import stratified

MAX_CELLS = 2_000  # cells used at most: each level is embedded and classified again
WHOLE = "whole"

Degrade = Callable[[sp.csr_matrix, np.random.Generator], sp.csr_matrix]
"""Counts `(cells, genes of the file)` and a generator -> fewer counts."""


def classify_degraded(context: Context, config: DegradedConfig, levels: Mapping[str, Degrade]) -> TaskResult:
    """A row for each features and classifier; columns for whole cells, and for each level and way of training."""
    if context.reader.ordered:
        kind = "ranks have no counts" if context.reader.ranked else "sequences have no counts or genes"
        return TaskResult(skipped=f"{kind} to lose")
    options, neighbors, repeats = context.options, config.neighbors, config.repeats
    chosen = labelled_cells(context, config.name, options.folds, "evaluate.folds", MAX_CELLS)
    if isinstance(chosen, TaskResult):
        return chosen
    whole = read_rows(context.reader, chosen.cells)
    predictions = Predictions(chosen.labels, repeats, halves=halves(context)[chosen.cells])
    for repeat in range(repeats):
        generator = np.random.Generator(np.random.Philox(key=[options.seed, 1000 + repeat]))
        counts = {WHOLE: whole} | {name: degrade(whole, generator) for name, degrade in levels.items()}
        cells = {level: features_of_counts(context, of_level) for level, of_level in counts.items()}
        for _, train, test in stratified(chosen.labels, options.folds, 1, options.seed + repeat):
            labels = chosen.labels[train]
            seen = {level: rows_of(of_level, train) for level, of_level in cells.items()}
            together = {kind: stacked([of_level[kind] for of_level in seen.values()]) for kind in seen[WHOLE]}
            with small_problems():
                fitted = {level: fit_all(of, labels, neighbors, context) for level, of in seen.items()}
                on_all = fit_all(together, np.tile(labels, len(cells)), neighbors, context)
                predictions.record(WHOLE, repeat, test, predict_all(fitted[WHOLE], rows_of(cells[WHOLE], test)))
                for level in levels:
                    tested = rows_of(cells[level], test)
                    ways = {"matched": fitted[level], "shifted": fitted[WHOLE], "trained on all levels": on_all}
                    for way, trained in ways.items():
                        predictions.record(f"{level}, {way}", repeat, test, predict_all(trained, tested))
    numbers = chosen.numbers | {"folds": options.folds, "repeats": repeats, "neighbors": neighbors}
    return TaskResult.from_columns(predictions.accuracies(), numbers, metric=f"{list(levels)[-1]}, shifted")


class LowDepth(Task):
    config: LowDepthConfig

    def run(self, context: Context) -> TaskResult:
        """Accuracy at each depth, matched and shifted; see `classify_degraded`."""
        levels = {f"{100 * frac:g} % of counts": partial(thin, frac) for frac in self.config.count_fracs}
        return classify_degraded(context, self.config, levels)


def thin(frac: float, counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
    """Keep each count with probability `frac`."""
    thinned = counts.copy()
    thinned.data = generator.binomial(counts.data, frac).astype(counts.dtype)
    thinned.eliminate_zeros()
    return thinned


class MissingGenes(Task):
    config: MissingGenesConfig

    def run(self, context: Context) -> TaskResult:
        """Accuracy with each number of genes, matched and shifted; see `classify_degraded`."""
        levels = {f"{n:,} genes": partial(keep_genes, n) for n in self.config.genes}
        return classify_degraded(context, self.config, levels)


def keep_genes(n: int, counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
    """Keep the counts of `n` genes, the same for all cells, drawn from those with any count."""
    drawn = generator.permutation(np.unique(counts.indices))[:n]
    return keep_columns(counts, np.isin(np.arange(counts.shape[1]), drawn))
