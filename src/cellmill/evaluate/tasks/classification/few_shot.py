"""Task `few_shot`: classifiers of the label that are fitted on a few cells of each class
(docs/evaluation.md).
"""

from cellmill.config.parts.tasks import FewShotConfig
from cellmill.evaluate.classifiers.ceiling import predict_ceiling_labels
from cellmill.evaluate.classifiers.class_predictions import ClassPredictions
from cellmill.evaluate.features.cell_features import cell_features
from cellmill.evaluate.labels import MAX_LABELLED_CELLS, labelled_cells
from cellmill.evaluate.scores import tabulate
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.splits import draw_shots
from cellmill.evaluate.task import Context, Task
from cellmill.evaluate.tasks.classification.fold_predictions import predict_folds
from cellmill.runs.results import TaskResult

MIN_TESTED = 5  # cells of a class that remain to be tested
# seconds to fit and score all classifiers of a draw: in all, and per cell
DRAW_S = 0.02
DRAW_CELL_S = 3e-5


class FewShot(Task):
    config: FewShotConfig

    def run(self, context: Context) -> TaskResult:
        """Accuracies by the number of fitted cells per class (shots). Classes with too few cells for a
        number are left out of it, and so are numbers with fewer than two classes.
        """
        config = self.config
        option = "evaluate.tasks.few_shot.shots"
        fewest = min(config.shots)
        chosen = labelled_cells(
            context,
            "few_shot",
            fewest + MIN_TESTED,
            option,
            reason=f"{fewest} to fit on, the least of {option}, and {MIN_TESTED} to test",
        )
        features = cell_features(context, chosen.cells)
        predictions = ClassPredictions(
            chosen.labels,
            config.draws,
            ceiling_labels=predict_ceiling_labels(context)[chosen.cells],
        )
        n_classes = {}
        left_out = {}
        for shots in sorted(config.shots):
            classes = [name for name, n in chosen.classes.items() if n >= shots + MIN_TESTED]
            n_classes[str(shots)] = len(classes)
            too_small = [name for name in chosen.classes if name not in classes]
            left_out[str(shots)] = ", ".join(too_small) or "none"
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

    def estimate_s(self, sizes: DatasetSizes) -> float:
        n = sizes.count_cells(MAX_LABELLED_CELLS)
        n_folds = len(self.config.shots) * self.config.draws
        return sizes.features_s(n) + sizes.halves_s(n) + n_folds * (DRAW_S + DRAW_CELL_S * n)
