"""Task `few_shot`: classifiers of a label that are trained on a few cells of each class.

Each draw takes so many cells of every class to train and tests on all others. Classes that would keep fewer than
`FEWEST_TESTED` cells for the test are left out. Principal components are those of the model's training cells, and no
features see a label. Standardised components are worse with few cells than raw ones, so each regression is fitted on
both.
"""

from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score
from sklearn.neighbors import KNeighborsClassifier

from cellmill.config.evaluate import FewShotConfig
from cellmill.evaluate.classifiers import fit, logistic, read_rows
from cellmill.evaluate.features import Features
from cellmill.evaluate.labelled import labelled_cells
from cellmill.evaluate.score_table import Scores, against_best, table_rows
from cellmill.evaluate.task import Context, TaskResult

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
        features, scores = Features(context).of(counts), Scores()
        n_classes = {}
        for shots in sorted(self.config.shots):
            classes = [name for name, n in chosen.classes.items() if n >= shots + FEWEST_TESTED]
            n_classes[str(shots)] = len(classes)
            for draw in range(self.config.draws if len(classes) > 1 else 0):
                generator = np.random.Generator(np.random.Philox(key=[context.options.seed, (shots << 32) + draw]))
                train, test = draw_shots(chosen.labels, classes, shots, generator)
                for name, accuracy in self._accuracies(features, chosen.labels, train, test, shots):
                    scores.setdefault(f"{shots} per class", {}).setdefault(name, []).append(accuracy)
        figures = chosen.figures | {"draws": self.config.draws, "n_classes": n_classes}
        return TaskResult(table_rows(scores), next(iter(scores)), against_best(scores, scores), figures)

    def _accuracies(
        self, features: dict[str, Any], labels: np.ndarray, train: np.ndarray, test: np.ndarray, shots: int
    ) -> list[tuple[str, float]]:
        """(features and classifier, accuracy) of one draw."""
        found = []
        for kind, values in features.items():
            classifiers = {
                "logistic regression": logistic(with_mean=kind != "all genes"),
                "logistic regression, unscaled": LogisticRegression(max_iter=1000),
                "kNN": KNeighborsClassifier(min(self.config.neighbors, shots)),
            }
            for name, classifier in classifiers.items():
                fit(classifier, values[train], labels[train])
                found.append(
                    (f"{kind} + {name}", float(accuracy_score(labels[test], classifier.predict(values[test]))))
                )
        return found


def draw_shots(
    labels: np.ndarray, classes: list[str], shots: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of `shots` training cells of each of `classes`, and of all other cells of these classes."""
    drawn = [generator.permutation(np.flatnonzero(labels == name)) for name in classes]
    return np.concatenate([cells[:shots] for cells in drawn]), np.concatenate([cells[shots:] for cells in drawn])
