"""Tasks that classify cells by label, against baselines: `probe`, `few_shot` and `leave_out`.

`probe`: logistic regression (on standardised and on unchanged features) and kNN predict the label of scored cells in
stratified cross-validation, repeated with other folds (`seeds`). Every kind of features gets the same folds and
classifiers: the embedding; the same architecture untrained; 50 principal components of the model's training cells; 50
principal components of the training cells of the fold; **all genes** of the cell (log(1 + counts per 10,000), library
size from the cell alone). Everything fitted, including scalers and components, is fitted on the training cells of a
fold or of the model. All-genes logistic regression is hard to beat: a table without it flatters a model. Classes with
fewer cells than folds are left out by name; the number of folds is never lowered, so that runs stay comparable. The
score of a repetition is computed over all its held-out cells together.

`few_shot`: each draw trains on a fixed number of cells of every class and tests on all others; all features and
classifiers get the same draws. Classes that would keep fewer than `FEWEST_TESTED` test cells are left out by name.
Principal components are those of the model's training cells, and no features see a label. Intervals are over cells and
draws.

`leave_out`: all cells of a donor (or batch) are tested by classifiers fitted on the other donors. One donor after
another is left out, or, with more than `most_folds` donors, groups of them with about equal numbers of cells. Features
and classifiers are those of `probe`. A class that only the tested donors have counts as wrong for every method; such
classes are named. Cells of one donor resemble each other, so a donor is one draw in the interval of a difference. The
interval is wide for a few donors, and two donors leave a comparison undecided.

Paired differences and their intervals are explained in `evaluate.scores`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from sklearn.decomposition import PCA
from sklearn.dummy import DummyClassifier
from sklearn.model_selection import GroupKFold, StratifiedKFold
from threadpoolctl import threadpool_limits

from cellmill.config.parts.tasks import FewShotConfig, LeaveOutConfig, ProbeConfig
from cellmill.data.arrays import text_values
from cellmill.evaluate.baselines import BaselineCache
from cellmill.evaluate.features import ALL_GENES, Features, fit_all, read_rows, with_external
from cellmill.evaluate.labels import labelled_cells
from cellmill.evaluate.scores import EMBEDDING, Predictions, ScoreColumn, against_best, differences, kind_of, table_rows
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


FEWEST_TESTED = 5


class FewShot:
    def __init__(self, config: FewShotConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Accuracy for each number of cells per class; numbers that fewer than two classes have are left out."""
        fewest = min(self.config.shots) + FEWEST_TESTED
        chosen = labelled_cells(context, "few_shot", fewest, "evaluate.tasks.few_shot.shots")
        if isinstance(chosen, TaskResult):
            return chosen
        counts = read_rows(context.reader, np.isin(np.arange(context.reader.n_obs), chosen.cells))
        features = with_external(Features(context).of(counts), context, chosen.cells)
        predictions = Predictions(chosen.labels, self.config.draws)
        classes_of, left_out = {}, {}
        for shots in sorted(self.config.shots):
            classes_of[shots] = [name for name, n in chosen.classes.items() if n >= shots + FEWEST_TESTED]
            left_out[str(shots)] = ", ".join(name for name in chosen.classes if name not in classes_of[shots]) or "none"
        with threadpool_limits(1):  # small problems: threads cost more than they save
            for shots, classes in classes_of.items():
                for draw in range(self.config.draws if len(classes) > 1 else 0):
                    generator = np.random.Generator(np.random.Philox(key=[context.options.seed, (shots << 32) + draw]))
                    train, test = draw_shots(chosen.labels, classes, shots, generator)
                    seen = {kind: values[train] for kind, values in features.items()}
                    neighbors = min(self.config.neighbors, shots)
                    fitted = fit_all(seen, chosen.labels[train], neighbors, context.baselines)
                    for name, classifier in fitted.items():
                        predicted = classifier.predict(features[name.partition(" + ")[0]][test])
                        predictions.record(f"{shots} per class", name, draw, test, predicted)
        columns = predictions.accuracies()
        n_classes = {str(shots): len(classes) for shots, classes in classes_of.items()}
        figures = chosen.figures | {"draws": self.config.draws, "n_classes": n_classes, "classes_left_out": left_out}
        return TaskResult(
            table_rows(columns), columns[0].heading, against_best(columns), figures, differences=differences(columns)
        )


def draw_shots(
    labels: np.ndarray, classes: list[str], shots: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of `shots` training cells of each of `classes`, and of all other cells of these classes."""
    drawn = [generator.permutation(np.flatnonzero(labels == name)) for name in classes]
    return np.concatenate([cells[:shots] for cells in drawn]), np.concatenate([cells[shots:] for cells in drawn])


MANY = {"donor": "donors", "batch": "batches"}
Split = tuple[np.ndarray, np.ndarray]  # indices of training and of test cells


class LeaveOut:
    def __init__(self, config: LeaveOutConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Accuracy and macro-F1 for each role that the dataset has; skipped without a label or such a role."""
        roles = [role for role in self.config.roles if role in context.roles]
        if not roles:
            return TaskResult(skipped=f"the dataset has no {' or '.join(self.config.roles)} column")
        chosen = labelled_cells(context, "leave_out", context.options.folds, "evaluate.folds")
        if isinstance(chosen, TaskResult):
            return chosen
        columns: list[ScoreColumn] = []
        figures = chosen.figures
        counts = read_rows(context.reader, np.isin(np.arange(context.reader.n_obs), chosen.cells))
        features = with_external(Features(context).of(counts, context.vectors[chosen.cells]), context, chosen.cells)
        for role in roles:
            groups = context.roles[role].iloc[chosen.cells]
            splits = [
                (train, test)
                for train, test in splits_of(groups, self.config.most_folds)
                if len(np.unique(chosen.labels[train])) > 1  # nothing else can be fitted
            ]
            figures = figures | {MANY[role]: int(groups.nunique()), f"{role}_folds": len(splits)}
            figures[f"classes_of_one_{role}"] = ", ".join(_of_one_group(chosen.labels, groups)) or "none"
            if not splits:
                continue
            with threadpool_limits(1):  # small problems: threads cost more than they save
                numbered = ((number, *split) for number, split in enumerate(splits))
                predictions = predict_splits(
                    features, chosen.labels, numbered, len(splits), self.config.neighbors, baselines=context.baselines
                )
            unseen = f"{MANY[role]} not seen"
            for metric, short, words in (("accuracy",) * 3, ("macro_f1", "macro F1", "macro-F1")):
                column = predictions.column("", metric, f"{short}, new {role}", f"{words}, {unseen}")
                columns.append(replace(column, n_units=len(splits)))
        if not columns:
            return TaskResult(
                figures=figures, skipped=f"the scored cells of two classes or more have one {' and one '.join(roles)}"
            )
        return TaskResult(
            table_rows(columns), columns[0].heading, against_best(columns), figures, differences=differences(columns)
        )


def splits_of(groups: pd.Series, most_folds: int) -> Iterator[Split]:
    """Training and test cells of each fold; cells without a group are in none, and one group gives no fold."""
    known = np.flatnonzero(groups.notna().to_numpy())
    names = text_values(groups.iloc[known]).astype(str)
    if (n := len(np.unique(names))) < 2:
        return
    for train, test in GroupKFold(min(n, most_folds)).split(known, groups=names):
        yield known[train], known[test]


def _of_one_group(labels: np.ndarray, groups: pd.Series) -> list[str]:
    n_groups = pd.Series(groups.to_numpy()).groupby(labels).nunique()
    return sorted(n_groups.index[n_groups < 2])
