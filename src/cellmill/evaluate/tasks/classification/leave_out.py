"""Task `leave_out`: classifiers of the label, tested on cells of donors or batches that are left out.

The classifiers are fitted on the cells of the other donors or batches. Each fold tests one donor or one
batch. If there are more than `most_folds` of them, a fold tests several. For an interval, each fold is
one independent unit. A class that only the tested donors or batches have is predicted by no method, so
its cells are wrong for every method.

docs/evaluation.md describes the task.
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
        """Score each pair of features and classifier by accuracy and by macro-F1, for each role.

        A role is `donor` or `batch`. Raises Skipped if the dataset has no label, or if no role of option
        `roles` makes a fold.
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
            # divide the cells into folds of donors or batches, here called groups
            groups = context.roles[role].iloc[chosen.cells]
            n_groups_by_class = pd.Series(groups.to_numpy()).groupby(labels).nunique()
            # classes that at most one donor or batch has
            in_one_group = sorted(n_groups_by_class.index[n_groups_by_class < 2])
            folds = split_groups(groups, self.config.most_folds, labels)
            figures |= {
                PLURALS[role]: int(groups.nunique()),
                f"{role}_folds": len(folds),
                f"classes_of_one_{role}": ", ".join(in_one_group) or "none",
            }
            if not folds:
                continue

            # predict and score the tested cells of each fold
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
            # the cells of a fold are not independent of each other
            columns += [replace(column, n_units=len(folds)) for column in (accuracy, f1)]
        if not columns:
            raise Skipped(explain_no_groups(context.roles, chosen.cells, roles), figures)
        return tabulate(columns, figures)

    def estimate_s(self, sizes: DatasetSizes) -> float:
        n = sizes.count_cells(MAX_LABELLED_CELLS)
        n_folds = sizes.count_folds(self.config.roles, self.config.most_folds)
        return sizes.features_s(n) + sizes.halves_s(n) + sizes.folds_s(n, n, n_folds)
