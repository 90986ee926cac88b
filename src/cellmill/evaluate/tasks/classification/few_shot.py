"""Task `few_shot`: classifiers of the label that are fitted on a few cells of each class.

The fitted cells of a class are called its shots. docs/evaluation.md describes the task.
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

MIN_TESTED = 5  # at least this many cells of a class must remain to be tested
# Seconds to fit and score all classifiers of one draw. They are DRAW_S, and DRAW_CELL_S for each cell.
DRAW_S = 0.02
DRAW_CELL_S = 3e-5


class FewShot(Task):
    config: FewShotConfig

    def run(self, context: Context) -> TaskResult:
        """Score each pair of features and classifier by accuracy, in a column for each number of shots.

        A class with too few cells for a number of shots is left out of that column. A number of shots with
        fewer than two remaining classes has no column.
        """
        config = self.config
        option = "evaluate.tasks.few_shot.shots"
        fewest_shots = min(config.shots)
        chosen = labelled_cells(
            context,
            "few_shot",
            fewest_shots + MIN_TESTED,
            option,
            reason=f"{fewest_shots} to fit on, the least of {option}, and {MIN_TESTED} to test",
        )
        features = cell_features(context, chosen.cells)
        predictions = ClassPredictions(
            chosen.labels,
            config.draws,
            ceiling_labels=predict_ceiling_labels(context)[chosen.cells],
        )
        n_classes = {}  # number of classes by number of shots
        left_out = {}  # names of the classes that are left out, by number of shots
        for shots in sorted(config.shots):
            classes = [name for name, n in chosen.classes.items() if n >= shots + MIN_TESTED]
            n_classes[str(shots)] = len(classes)
            too_small = [name for name in chosen.classes if name not in classes]
            left_out[str(shots)] = ", ".join(too_small) or "none"
            if len(classes) < 2:
                continue
            folds = draw_shots(chosen.labels, classes, shots, config.draws, context.options.seed)
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
