"""Task `leave_out`: classifiers of the label on cells of donors or batches that they were not fitted
on (docs/evaluation.md).

Each fold tests one donor or batch, or several if there are more than `most_folds`, and is one draw
in an interval. Cells of a class that only the tested donors or batches have are wrong for every
method.
"""

from dataclasses import replace

import pandas as pd

from cellmill.config.parts.tasks import LeaveOutConfig
from cellmill.evaluate.classifiers.ceiling import predict_ceiling_labels
from cellmill.evaluate.classifiers.class_predictions import ClassPredictions
from cellmill.evaluate.features.cell_features import cell_features
from cellmill.evaluate.labels import MAX_LABELLED_CELLS, labelled_cells
from cellmill.evaluate.scores import ScoreColumn, tabulate
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.splits import PLURALS, explain_no_groups, split_groups
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.evaluate.tasks.classification.fold_predictions import predict_folds
from cellmill.runs.results import TaskResult


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
        ceiling_labels = predict_ceiling_labels(context)[chosen.cells]
        features = cell_features(context, chosen.cells)
        columns: list[ScoreColumn] = []
        figures = chosen.figures
        for role in roles:
            groups = context.roles[role].iloc[chosen.cells]
            n_groups_of_class = pd.Series(groups.to_numpy()).groupby(labels).nunique()
            in_one_group = sorted(n_groups_of_class.index[n_groups_of_class < 2])
            folds = split_groups(groups, self.config.most_folds, labels)
            figures |= {
                PLURALS[role]: int(groups.nunique()),
                f"{role}_folds": len(folds),
                f"classes_of_one_{role}": ", ".join(in_one_group) or "none",
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
            unseen = f"{PLURALS[role]} not seen"
            accuracy = predictions.column(
                "", "accuracy", f"accuracy, new {role}", f"accuracy, {unseen}"
            )
            f1 = predictions.column("", "macro_f1", f"macro F1, new {role}", f"macro-F1, {unseen}")
            columns += [replace(column, n_units=len(folds)) for column in (accuracy, f1)]
        if not columns:
            raise Skipped(explain_no_groups(context.roles, chosen.cells, roles), figures)
        return tabulate(columns, figures)

    def estimate_s(self, sizes: DatasetSizes) -> float:
        n = sizes.count_cells(MAX_LABELLED_CELLS)
        n_folds = sizes.count_folds(self.config.roles, self.config.most_folds)
        return sizes.features_s(n) + sizes.halves_s(n) + sizes.folds_s(n, n, n_folds)
