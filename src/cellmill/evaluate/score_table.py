"""Accuracies of several features and classifiers under several conditions: the table and its verdicts."""

from collections.abc import Collection
from typing import Any

import numpy as np

from cellmill.runs.verdict import Verdict, compare

EMBEDDING = "embedding"
"""Name of the model's features; other names are baselines."""
Scores = dict[str, dict[str, list[float]]]
"""Accuracy of each fold or draw, by condition (a column) and by features and classifier (a row)."""


def table_rows(scores: Scores) -> list[dict[str, Any]]:
    """Rows of the table with mean, sample standard deviation and single values; None where a row lacks a condition."""
    names = dict.fromkeys(name for column in scores.values() for name in column)
    rows = []
    for name in names:
        row: dict[str, Any] = {"name": name, "kind": "model" if name.startswith(EMBEDDING) else "baseline"}
        for column, of_name in scores.items():
            values = of_name.get(name)
            row[f"{column}_mean"] = None if values is None else float(np.mean(values))
            row[f"{column}_sd"] = None if values is None else float(np.std(values, ddof=1))
            row[f"{column}_folds"] = values
        rows.append(row)
    return rows


def against_best(scores: Scores, columns: Collection[str]) -> list[Verdict]:
    """The embedding under each classifier against the best baseline under any, in each of `columns`."""
    verdicts = []
    for column in columns:
        of_name = scores[column]
        baselines = {name: values for name, values in of_name.items() if not name.startswith(EMBEDDING)}
        best = max(baselines, key=lambda name: float(np.mean(baselines[name])))
        for name in (name for name in of_name if name.startswith(EMBEDDING)):
            differences = np.subtract(of_name[name], baselines[best])
            spread = float(np.std(differences, ddof=1))
            verdicts.append(compare(name, best, f"accuracy, {column}", float(np.mean(differences)), spread))
    return verdicts
