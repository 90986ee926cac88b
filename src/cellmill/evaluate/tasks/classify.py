"""Tasks that classify cells by label, against baselines (docs/evaluation.md).

All kinds of features get the same folds and classifiers. Everything fitted, scalers and components
included, is fitted on the training cells of a fold or of the model. The number of folds is never
lowered, so that runs stay comparable.

A donor or batch that `leave_out` tests is one draw in an interval; a class that only it has counts
as wrong for every method.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pandas as pd
from sklearn.preprocessing import StandardScaler

from cellmill.config.parts.tasks import FewShotConfig, LeaveOutConfig, ProbeConfig
from cellmill.evaluate.baselines import PredictionCache
from cellmill.evaluate.classifiers.fitted import (
    fit_all,
    precompute_folds,
    predict_all,
    predict_majority,
    without_overhead,
)
from cellmill.evaluate.components import (
    COMPONENTS,
    VARIABLE_GENES,
    RankedGenes,
    choose_variable_genes,
    pca,
    project_on_fitted,
)
from cellmill.evaluate.features import cell_features
from cellmill.evaluate.labels import labelled_cells, predict_from_other_half
from cellmill.evaluate.methods import (
    ALL_GENES,
    EMBEDDING,
    KNN,
    MAJORITY,
    RANKED,
    REGRESSION,
    TRAINING_COMPONENTS,
    UNSCALED_REGRESSION,
    WITH_COMPONENTS,
    ByMethod,
    Features,
    group_by_features,
    select_cells,
)
from cellmill.evaluate.products import SharedCells
from cellmill.evaluate.scores import ClassPredictions, ScoreColumn, tabulate
from cellmill.evaluate.splits import Fold, draw_shots, split_by_class, split_groups
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.runs.results import ScoredMethod, TaskResult, Verdict

MIN_TESTED = 5
MANY = {"donor": "donors", "batch": "batches"}


class Probe(Task):
    config: ProbeConfig

    def run(self, context: Context) -> TaskResult:
        """Scores of every features and classifier; skipped without a label or with fewer than two
        large classes.
        """
        options = context.options
        config = self.config
        chosen = labelled_cells(context, "probe", options.folds, "evaluate.folds")
        features = cell_features(context, chosen.cells)
        predictions = ClassPredictions(
            chosen.labels,
            config.seeds,
            ceiling_labels=predict_from_other_half(context)[chosen.cells],
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
        return tabulate(columns, figures, verdicts=judge(columns), confusion=confusion)


class FewShot(Task):
    config: FewShotConfig

    def run(self, context: Context) -> TaskResult:
        """Accuracy for each number of cells per class; numbers that fewer than two classes have are
        left out.
        """
        config = self.config
        min_cells = min(config.shots) + MIN_TESTED
        chosen = labelled_cells(context, "few_shot", min_cells, "evaluate.tasks.few_shot.shots")
        features = cell_features(context, chosen.cells)
        predictions = ClassPredictions(
            chosen.labels,
            config.draws,
            ceiling_labels=predict_from_other_half(context)[chosen.cells],
        )
        n_classes = {}
        left_out = {}
        for shots in sorted(config.shots):
            classes = [name for name, n in chosen.classes.items() if n >= shots + MIN_TESTED]
            n_classes[str(shots)] = len(classes)
            # the largest come first
            left_out[str(shots)] = ", ".join([*chosen.classes][len(classes) :]) or "none"
            if len(classes) > 1:
                folds = draw_shots(
                    chosen.labels, classes, shots, config.draws, context.options.seed
                )
                neighbors = min(config.neighbors, shots)
                condition = f"{shots} per class"
                predict_folds(predictions, features, folds, neighbors, context, condition)
        figures = chosen.figures | {
            "draws": config.draws,
            "n_classes": n_classes,
            "classes_left_out": left_out,
        }
        return tabulate(predictions.accuracies(), figures)


class LeaveOut(Task):
    config: LeaveOutConfig

    def run(self, context: Context) -> TaskResult:
        """Accuracy and macro-F1 for each role that the dataset has; skipped without a label or such
        a role.
        """
        roles = [role for role in self.config.roles if role in context.roles]
        if not roles:
            raise Skipped(f"the dataset has no {' or '.join(self.config.roles)} column")
        chosen = labelled_cells(context, "leave_out", context.options.folds, "evaluate.folds")
        labels = chosen.labels
        ceiling_labels = predict_from_other_half(context)[chosen.cells]
        features = cell_features(context, chosen.cells)
        columns: list[ScoreColumn] = []
        figures = chosen.figures
        for role in roles:
            groups = context.roles[role].iloc[chosen.cells]
            n_groups = pd.Series(groups.to_numpy()).groupby(labels).nunique()  # for each class
            in_one_group = ", ".join(sorted(n_groups.index[n_groups < 2]))
            folds: list[Fold] = []
            for train, test in split_groups(groups, self.config.most_folds):
                # training cells of one class fit nothing
                if len(np.unique(labels[train])) > 1:
                    folds.append(Fold(len(folds), train, test))
            figures |= {
                MANY[role]: int(groups.nunique()),
                f"{role}_folds": len(folds),
                f"classes_of_one_{role}": in_one_group or "none",
            }
            if not folds:
                continue
            predictions = ClassPredictions(labels, len(folds), ceiling_labels=ceiling_labels)
            predict_folds(
                predictions,
                features,
                folds,
                self.config.neighbors,
                context,
                with_fitted_features=True,
            )
            unseen = f"{MANY[role]} not seen"
            accuracy = predictions.column(
                "", "accuracy", f"accuracy, new {role}", f"accuracy, {unseen}"
            )
            f1 = predictions.column("", "macro_f1", f"macro F1, new {role}", f"macro-F1, {unseen}")
            columns += [replace(column, n_units=len(folds)) for column in (accuracy, f1)]
        if not columns:
            which = " and one ".join(roles)
            raise Skipped(f"the scored cells of two classes or more have one {which}", figures)
        return tabulate(columns, figures)


def predict_folds(
    predictions: ClassPredictions,
    features: Features,
    folds: Iterable[Fold],
    neighbors: int,
    context: Context,
    condition: str = "",
    with_fitted_features: bool = False,
) -> None:
    """Predict the test cells of each fold with every pair of features and classifier.

    `with_fitted_features` adds the majority class, and features fitted on the training cells:
    principal components, and the embedding joined to the components of the model's training cells.
    """
    labels = predictions.labels
    folds = [*folds]
    shared = context.last_cells.share(features[ALL_GENES])
    if not context.options.classifiers:  # those of other packages know no shared products
        features = {**features, ALL_GENES: shared}
        with without_overhead():
            precompute_folds(shared, labels, folds, context.baselines.predictions)
    # components of all folds before the ranks of genes, which take as much memory
    components: list[ByMethod] = [{} for _ in folds]
    if with_fitted_features:
        with without_overhead():
            components = [
                _fit_components(shared, fold.train, COMPONENTS, context.baselines) for fold in folds
            ]
    ranked = RankedGenes(shared.matrix)
    for fold, fitted_components in zip(folds, components):
        train = fold.train
        test = fold.test
        with without_overhead():
            split_features = {**features, RANKED: ranked.select(train, labels[train])}
            split_features |= fitted_components
            if with_fitted_features and TRAINING_COMPONENTS in features:
                scaler = StandardScaler().fit(features[EMBEDDING][train])
                scaled = scaler.transform(features[EMBEDDING])
                joined = np.hstack([scaled, features[TRAINING_COMPONENTS]])
                split_features[WITH_COMPONENTS] = joined
            train_features = select_cells(split_features, train)
            fitted = fit_all(train_features, labels[train], neighbors, context)
            predicted = predict_all(fitted, select_cells(split_features, test))
        if with_fitted_features:
            predicted[MAJORITY] = predict_majority(labels[train], len(test))
        predictions.record(condition, fold.repetition, test, predicted)


def _fit_components(
    genes: SharedCells, train: np.ndarray, n_components: int, cache: PredictionCache
) -> ByMethod:
    """Principal components of all cells, fitted on cells `train`: of all genes, and of the variable
    genes unless all genes count as variable. Empty if there are too few cells or genes.
    """
    if min(len(train), genes.shape[1]) < 2:
        return {}
    cells = genes.matrix
    unfitted = pca((len(train), cells.shape[1]), n_components)
    features = {
        ScoredMethod(f"PCA{n_components}"): cache.get_or_compute(
            f"{unfitted!r} from products, fitted on {train.tolist()}",
            genes,
            lambda: project_on_fitted(genes.products(genes), train, unfitted.n_components),
        )
    }
    if cells.shape[1] > VARIABLE_GENES:
        panel = cells[:, choose_variable_genes(cells[train])]
        of_panel = pca((len(train), panel.shape[1]), n_components)
        features[ScoredMethod(f"PCA{n_components} of variable genes")] = cache.get_or_compute(
            f"{of_panel!r} fitted on {train.tolist()}",
            panel,
            lambda: of_panel.fit(panel[train]).transform(panel),
        )
    return features


def judge(columns: list[ScoreColumn]) -> list[Verdict]:
    """Verdicts of the model's best against the best baseline in each metric, then by accuracy.

    These compare the embedding with each baseline's features, by kind of classifier, and the
    embedding joined to principal components with the components alone.
    """
    verdicts = [column.compare_best() for column in columns]
    accuracy = columns[0]
    for classifiers in ((REGRESSION, UNSCALED_REGRESSION), (KNN,)):
        by_features = group_by_features(
            method for method in accuracy.scores if method.classifier in classifiers
        )
        embedding = accuracy.best(by_features[EMBEDDING.features])
        for methods in by_features.values():
            if methods[0].kind == "baseline":
                verdicts.append(accuracy.compare(embedding, accuracy.best(methods)))
    by_features = group_by_features(accuracy.scores)
    if WITH_COMPONENTS.features in by_features and TRAINING_COMPONENTS.features in by_features:
        joined = accuracy.best(by_features[WITH_COMPONENTS.features])
        components = accuracy.best(by_features[TRAINING_COMPONENTS.features])
        verdicts.append(accuracy.compare(joined, components))
    return list(dict.fromkeys(verdicts))
