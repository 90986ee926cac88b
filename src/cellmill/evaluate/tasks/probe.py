"""Task `probe`: classifiers of a label on embeddings, against baselines.

Logistic regression, on standardised features and on features as they are, and kNN predict the label of scored cells in
stratified cross-validation, which is repeated with other folds (`seeds`). Every kind of features gets the same folds
and classifiers: the embedding; the same architecture untrained; 50 principal components of the model's training cells;
50 principal components of the training cells of the fold; **all genes** of the cell (log(1 + counts per 10,000),
library size from the cell alone). Everything fitted, scalers and components included, is fitted on the training cells
of a fold or of the model. All-genes logistic regression is hard to beat: a table without it flatters a model. Classes
with fewer cells than folds are left out by name; folds are never lowered, so that runs stay comparable.

A score of a repetition is that of all its held-out cells together. Paired differences, and what varies in their
intervals, are explained in `evaluate.paired`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from sklearn.decomposition import PCA
from sklearn.dummy import DummyClassifier
from sklearn.model_selection import StratifiedKFold
from threadpoolctl import threadpool_limits

from cellmill.config.evaluate import ProbeConfig
from cellmill.evaluate.baseline_cache import BaselineCache
from cellmill.evaluate.classifiers import fit_all, read_rows
from cellmill.evaluate.features import ALL_GENES, Features, with_external
from cellmill.evaluate.labelled import labelled_cells
from cellmill.evaluate.score_table import (
    EMBEDDING,
    Predictions,
    ScoreColumn,
    against_best,
    differences,
    kind_of,
    table_rows,
)
from cellmill.evaluate.task import Context, TaskResult
from cellmill.runs.verdict import Verdict

MAJORITY = "majority"
METRICS = {"accuracy": "accuracy", "macro_f1": "macro-F1", "weighted_f1": "weighted F1"}


class Probe:
    def __init__(self, config: ProbeConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Scores of every features and classifier; skipped without a label or with fewer than two large classes."""
        options, config = context.options, self.config
        chosen = labelled_cells(context, "probe", options.folds, "evaluate.folds")
        if isinstance(chosen, TaskResult):
            return chosen
        counts = read_rows(context.reader, np.isin(np.arange(context.reader.n_obs), chosen.cells))
        features = with_external(Features(context).of(counts, context.vectors[chosen.cells]), context, chosen.cells)
        with threadpool_limits(1):  # small problems: threads cost more than they save
            predictions = predict_folds(
                features,
                chosen.labels,
                options.folds,
                config.seeds,
                options.seed,
                config.neighbors,
                baselines=context.baselines,
            )
        columns = [predictions.column("", metric, metric, words) for metric, words in METRICS.items()]
        figures = chosen.figures | {"folds": options.folds, "seeds": config.seeds, "neighbors": config.neighbors}
        confusion = predictions.confusion("", columns[0].best(own=True))
        compared = differences(columns)
        return TaskResult(
            table_rows(columns), "accuracy", judge(columns), figures, differences=compared, confusion=confusion
        )  # fmt: skip


def predict_folds(
    features: Mapping[str, Any],
    labels: np.ndarray,
    folds: int,
    seeds: int,
    seed: int,
    neighbors: int,
    components: int = 50,
    baselines: BaselineCache | None = None,
) -> Predictions:
    """Predictions of held-out cells by every features and classifier; the condition has no name.

    Each class of `labels` has at least `folds` cells.
    """
    splits = (
        (repetition, train, test)
        for repetition in range(seeds)
        for train, test in StratifiedKFold(folds, shuffle=True, random_state=seed + repetition).split(labels, labels)
    )
    return predict_splits(features, labels, splits, seeds, neighbors, components, baselines)


def predict_splits(
    features: Mapping[str, Any],
    labels: np.ndarray,
    splits: Iterable[tuple[int, np.ndarray, np.ndarray]],
    repetitions: int,
    neighbors: int,
    components: int = 50,
    baselines: BaselineCache | None = None,
) -> Predictions:
    """As `predict_folds`, for any splits: repetition, indices of training cells and of test cells."""
    cache = BaselineCache() if baselines is None else baselines
    predictions = Predictions(labels, repetitions)
    for repetition, train, test in splits:
        made = {**features, **_components(features[ALL_GENES], train, components, cache)}
        fitted = fit_all({kind: values[train] for kind, values in made.items()}, labels[train], neighbors, cache)
        for name, classifier in fitted.items():
            values = made[name.partition(" + ")[0]][test]
            predictions.record("", name, repetition, test, classifier.predict(values))
        frequent = DummyClassifier(strategy="most_frequent").fit(train, labels[train]).predict(test)
        predictions.record("", MAJORITY, repetition, test, frequent)
    return predictions


def _components(genes: Any, train: np.ndarray, components: int, cache: BaselineCache) -> dict[str, np.ndarray]:
    """Principal components fitted on `train`, of all cells; none where cells or genes are too few."""
    n = min(components, len(train) - 1, genes.shape[1] - 1)
    if n < 1:
        return {}
    pca = PCA(n, svd_solver="arpack", random_state=0)
    about = f"{pca!r} fitted on {train.tolist()}"
    return {f"PCA{components}": cache.features(about, genes, lambda: pca.fit(genes[train]).transform(genes))}


def judge(columns: list[ScoreColumn]) -> list[Verdict]:
    """Verdicts: best against best in each metric, then accuracy against each kind of features, by classifier.

    Of the two logistic regressions on a kind of features the better one is compared.
    """
    verdicts, accuracy = against_best(columns), columns[0]
    for classifier in ("logistic regression", "kNN"):
        of_kind: dict[str, list[str]] = {}
        for name in (name for name in accuracy.scores if f" + {classifier}" in name):
            of_kind.setdefault(name.partition(" + ")[0], []).append(name)
        own = accuracy.best(True, of_kind[EMBEDDING])
        others = [accuracy.best(False, names) for names in of_kind.values() if kind_of(names[0]) == "baseline"]
        verdicts += [accuracy.compare(own, other) for other in others]
    return list(dict.fromkeys(verdicts))
