"""Task `leave_out`: classifiers of a label for donors or batches that they saw no cell of.

All cells of a donor (or batch) are tested by classifiers fitted on the other donors: one after another is left out, or
with more than `most_folds` of them, groups of donors of about equal numbers of cells. Features and classifiers are
those of task `probe`, and everything fitted is fitted on the training cells. A class that only the tested donors have
counts as wrong for every method; such classes are named. Cells of one donor resemble each other, so a donor is one
draw in the interval of a paired difference (`evaluate.paired`), which is wide for a few donors; two of them leave a
comparison undecided.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
from sklearn.model_selection import GroupKFold
from threadpoolctl import threadpool_limits

from cellmill.config.evaluate import LeaveOutConfig
from cellmill.data.text_columns import text_values
from cellmill.evaluate.classifiers import read_rows
from cellmill.evaluate.features import Features, with_external
from cellmill.evaluate.labelled import labelled_cells
from cellmill.evaluate.score_table import ScoreColumn, against_best, differences, table_rows
from cellmill.evaluate.task import Context, TaskResult
from cellmill.evaluate.tasks.probe import predict_splits

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
