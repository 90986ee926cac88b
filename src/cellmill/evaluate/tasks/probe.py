"""Task `probe`: classifiers of a label on embeddings, against baselines.

A logistic regression and a kNN classifier predict the label of scored cells from their embedding in stratified
cross-validation. The same folds are given to: the most frequent class; 50 principal components and **all genes** of the
cell (log(1 + counts per 10,000), library size from the cell alone); and the same architecture untrained. Everything
fitted, scalers and components included, is fitted on the training cells of a fold. All-genes logistic regression is
hard to beat: a table without it flatters a model. Classes with fewer cells than folds are left out by name; folds are
never lowered, so that runs stay comparable.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.dummy import DummyClassifier
from sklearn.metrics import accuracy_score, f1_score
from sklearn.model_selection import StratifiedKFold

from cellmill.config.evaluate import ProbeConfig
from cellmill.data.count_matrix import summed
from cellmill.evaluate.classifiers import classifiers, fit, log_normalise, logistic, read_rows
from cellmill.evaluate.embed import embed_cells
from cellmill.evaluate.labelled import labelled_cells
from cellmill.evaluate.task import TOKEN_BUDGET, Context, TaskResult
from cellmill.runs.verdict import Verdict, compare

EMBEDDING, MAJORITY = "embedding", "majority"
BASELINES = ("all genes", "PCA50", "untrained")
"""Features that the embedding is compared with, under the same classifier."""


class Probe:
    def __init__(self, config: ProbeConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Rows of `probe_table` and verdicts on them; skipped without a label or with fewer than two large classes."""
        options = context.options
        chosen = labelled_cells(context, "probe", options.folds, "evaluate.folds")
        if isinstance(chosen, TaskResult):
            return chosen
        cells = chosen.cells
        figures = chosen.figures | {"folds": options.folds, "neighbors": self.config.neighbors}
        mask = np.isin(np.arange(context.reader.n_obs), cells)
        model, counts = context.model, read_rows(context.reader, mask)
        untrained = embed_cells(context.reader, model.untrained, model.vocabulary, model.tokens, TOKEN_BUDGET, mask)
        rows = probe_table(
            context.vectors[cells],
            untrained.vectors,
            log_normalise(summed(counts) if context.reader.ordered else counts),
            chosen.labels,
            folds=options.folds,
            neighbors=self.config.neighbors,
            seed=options.seed,
        )
        return TaskResult(rows=rows, metric="accuracy", verdicts=judge_probes(rows), figures=figures)


def probe_table(
    embedding: np.ndarray,
    untrained: np.ndarray,
    genes: sp.csr_matrix,
    labels: np.ndarray,
    *,
    folds: int,
    neighbors: int,
    seed: int,
    components: int = 50,
) -> list[dict[str, Any]]:
    """Cross-validated scores: one row for each pair of features and classifier.

    `embedding` and `untrained`, `(cells, hidden)`, are of the model and of its architecture with random weights;
    `genes`, `(cells, genes)`, are `log_normalise`d counts; each class of `labels` has at least `folds` cells. Each row
    has `name`, `kind` (model or baseline), `accuracy_mean`, `accuracy_sd` (sample standard deviation over folds),
    `macro_f1_mean`, `macro_f1_sd`, `accuracy_folds`, `macro_f1_folds`, and `not_converged`, the number of folds in
    which a regression stopped before it converged.
    """
    scores: dict[str, list[tuple[float, float, bool]]] = {}
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
    for train, test in splitter.split(np.zeros(len(labels)), labels):
        for name, classifier, seen, unseen in _fold(embedding, untrained, genes, train, test, neighbors, components):
            not_converged = not fit(classifier, seen, labels[train])
            predicted = classifier.predict(unseen)
            f1 = f1_score(labels[test], predicted, average="macro", zero_division=0)
            scores.setdefault(name, []).append((accuracy_score(labels[test], predicted), f1, not_converged))
    return [_row(name, values) for name, values in scores.items()]


def _fold(
    embedding: np.ndarray,
    untrained: np.ndarray,
    genes: sp.csr_matrix,
    train: np.ndarray,
    test: np.ndarray,
    neighbors: int,
    components: int,
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Row name, unfitted classifier, features of the training cells and of the test cells."""

    def dense(name: str, seen: np.ndarray, unseen: np.ndarray) -> Iterator[tuple[str, Any, Any, Any]]:
        for classifier, unfitted in classifiers(neighbors, len(train)).items():
            yield f"{name} + {classifier}", unfitted, seen, unseen

    yield from dense(EMBEDDING, embedding[train], embedding[test])
    yield from dense("untrained", untrained[train], untrained[test])
    yield MAJORITY, DummyClassifier(strategy="most_frequent"), embedding[train], embedding[test]
    n_components = min(components, len(train) - 1, genes.shape[1] - 1)
    if n_components >= 1:
        pca = PCA(n_components, svd_solver="arpack", random_state=0).fit(genes[train])
        yield from dense("PCA50", pca.transform(genes[train]), pca.transform(genes[test]))
    # genes stay sparse: the optimum is the same without centring, since the intercept has no penalty
    yield "all genes + logistic regression", logistic(with_mean=False), genes[train], genes[test]


def _row(name: str, values: list[tuple[float, float, bool]]) -> dict[str, Any]:
    accuracy, f1 = [float(v[0]) for v in values], [float(v[1]) for v in values]
    return {
        "name": name,
        "kind": "model" if name.startswith(EMBEDDING) else "baseline",
        "accuracy_mean": float(np.mean(accuracy)),
        "accuracy_sd": float(np.std(accuracy, ddof=1)),
        "macro_f1_mean": float(np.mean(f1)),
        "macro_f1_sd": float(np.std(f1, ddof=1)),
        "accuracy_folds": accuracy,
        "macro_f1_folds": f1,
        "not_converged": sum(v[2] for v in values),
    }


def judge_probes(rows: Iterable[dict[str, Any]]) -> list[Verdict]:
    """Verdicts on the embedding under each classifier against the baselines, from the rows of `probe_table`.

    Accuracy decides, to the three digits that tables print. Macro-F1 follows where only one of the two is lost.
    """
    table = {row["name"]: row for row in rows}
    verdicts = []
    for name in (name for name in table if name.startswith(EMBEDDING)):
        baselines = [features + name.removeprefix(EMBEDDING) for features in BASELINES]
        for baseline in (baseline for baseline in (*baselines, MAJORITY) if baseline in table):
            accuracy, f1 = (_compare(table[name], table[baseline], metric) for metric in ("accuracy", "macro_f1"))
            verdicts += [accuracy, f1] if (accuracy.outcome == "lost") != (f1.outcome == "lost") else [accuracy]
    return verdicts


def _compare(own: dict[str, Any], baseline: dict[str, Any], metric: str) -> Verdict:
    ours, theirs = (round(row[f"{metric}_mean"], 3) for row in (own, baseline))
    spread = float(np.std(np.subtract(own[f"{metric}_folds"], baseline[f"{metric}_folds"]), ddof=1))
    return compare(own["name"], baseline["name"], metric.replace("_f1", "-F1"), round(ours - theirs, 3), spread)
