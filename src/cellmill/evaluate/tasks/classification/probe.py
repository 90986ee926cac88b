"""Task `probe`: classifiers of the label in cross-validation, compared with baselines.

Classes with too few cells are left out. The number of folds is never lowered for them, so that the
results of different runs can be compared. docs/evaluation.md describes the task.
"""

from cellmill.config.parts.tasks import ProbeConfig
from cellmill.evaluate.classifiers.ceiling import predict_ceiling_labels
from cellmill.evaluate.classifiers.class_predictions import ClassPredictions
from cellmill.evaluate.features.cell_features import cell_features
from cellmill.evaluate.labels import MAX_LABELLED_CELLS, labelled_cells
from cellmill.evaluate.methods import (
    EMBEDDING,
    KNN,
    REGRESSION,
    TRAINING_COMPONENTS,
    UNSCALED_REGRESSION,
    WITH_COMPONENTS,
    group_by_features,
)
from cellmill.evaluate.scores import ScoreColumn, tabulate
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.splits import split_by_class
from cellmill.evaluate.task import Context, Task
from cellmill.evaluate.tasks.classification.fold_predictions import predict_folds
from cellmill.runs.results import TaskResult, Verdict


class Probe(Task):
    config: ProbeConfig

    def run(self, context: Context) -> TaskResult:
        """Score each pair of features and classifier, by each metric.

        Raises Skipped if the dataset has no label, or if fewer than two classes have enough cells.
        """
        options = context.options
        config = self.config
        chosen = labelled_cells(context, "probe", options.folds, "evaluate.folds")
        features = cell_features(context, chosen.cells)
        predictions = ClassPredictions(
            chosen.labels,
            config.seeds,
            ceiling_labels=predict_ceiling_labels(context)[chosen.cells],
        )
        folds = split_by_class(chosen.labels, options.folds, config.seeds, options.seed)
        predict_folds(
            predictions, features, folds, config.neighbors, context, with_fitted_features=True
        )
        columns = predictions.metric_columns("")
        figures = chosen.figures | {
            "folds": options.folds,
            "seeds": config.seeds,
            "neighbors": config.neighbors,
        }
        confusion = predictions.confusion("", columns[0].best_model())
        return tabulate(columns, figures, verdicts=compare_features(columns), confusion=confusion)

    def estimate_s(self, sizes: DatasetSizes) -> float:
        n = sizes.count_cells(MAX_LABELLED_CELLS)
        n_fitted = n - n // sizes.folds
        n_folds = self.config.seeds * sizes.folds
        return sizes.features_s(n) + sizes.halves_s(n) + sizes.folds_s(n, n_fitted, n_folds)


def compare_features(columns: list[ScoreColumn]) -> list[Verdict]:
    """Judge the model against baselines, and return the verdicts in the order of the comments below.

    `columns` are the columns of the metrics. The first column is accuracy.
    """
    # in each metric: the best method of the model against the best baseline
    verdicts = [column.best_verdict() for column in columns]

    # by accuracy, for regressions and for kNN: the embedding against the features of each baseline
    accuracy = columns[0]
    for classifiers in ((REGRESSION, UNSCALED_REGRESSION), (KNN,)):
        by_features = group_by_features(
            method for method in accuracy.scores if method.classifier in classifiers
        )
        embedding = accuracy.best(by_features[EMBEDDING.features])
        for methods in by_features.values():
            if methods[0].kind == "baseline":
                verdicts.append(accuracy.verdict(embedding, accuracy.best(methods)))

    # by accuracy: the embedding joined to principal components against these components alone
    by_features = group_by_features(accuracy.scores)
    joined = accuracy.best(by_features[WITH_COMPONENTS.features])
    components = accuracy.best(by_features[TRAINING_COMPONENTS.features])
    verdicts.append(accuracy.verdict(joined, components))
    return list(dict.fromkeys(verdicts))  # two of the comparisons may be the same
