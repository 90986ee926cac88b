"""Task `few_shot`: classifiers of a label that are trained on a few cells of each class.

Each draw takes so many cells of every class to train and tests on all others; all features and classifiers get the same
draws. Classes that would keep fewer than `FEWEST_TESTED` cells for the test are left out by name. Principal components
are those of the model's training cells, and no features see a label. Intervals of differences are over cells and draws
(`evaluate.paired`).
"""

import numpy as np
from threadpoolctl import threadpool_limits

from cellmill.config.evaluate import FewShotConfig
from cellmill.evaluate.classifiers import fit_all, read_rows
from cellmill.evaluate.features import Features, with_external
from cellmill.evaluate.labelled import labelled_cells
from cellmill.evaluate.score_table import Predictions, against_best, differences, table_rows
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
