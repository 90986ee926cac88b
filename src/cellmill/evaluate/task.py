"""Contract of an evaluation task.

The `implementation` of a task's options (`config.parts.tasks.TaskConfig`) names its class. Stage
`evaluate` calls `run` once per dataset, and once for each further label if the task reads a label.
A result that still holds is read instead (`finished.py`). So a task that reads no cells runs for the
first dataset only, and its result is read for the others. The stage writes all results to
metrics.json; the report shows any task.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from cellmill.config.evaluate import Evaluate
from cellmill.data.genes.names import GeneColumns, match_columns
from cellmill.data.inputs.reader import CountsReader
from cellmill.evaluate.evaluated_datasets import EvaluatedDatasets
from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.evaluate.features.products import FeatureCache
from cellmill.evaluate.inference.embed import read_levels
from cellmill.evaluate.prediction_cache import PredictionCache
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.runs.results import TaskResult


@dataclass(frozen=True)
class Context:
    """One dataset under evaluation."""

    dataset: str
    reader: CountsReader
    scored: np.ndarray
    """Cells to score, `(n_obs,)` bool: held-out cells that have an embedding; with `options.cells`
    all, every cell that has one.
    """
    vectors: np.ndarray
    """Embeddings of all cells, `(n_obs, hidden)` float32; NaN rows for cells without a known gene."""
    roles: Mapping[str, pd.Series]
    """obs columns by role, with the column's name: `label`, `label 2`, ... and `batch`, `donor`,
    `condition`, `perturbation`, `dose` and `is_control` (bool). Roles that the dataset lacks are
    absent.
    """
    model: EvaluatedModel
    options: Evaluate
    """Section `evaluate`."""
    prediction_cache: PredictionCache = field(default_factory=PredictionCache)
    """Predictions of baselines that were computed before."""
    feature_cache: FeatureCache = field(default_factory=FeatureCache)
    """Features of the cells that the previous task read."""
    embedding_cost: Mapping[str, float] = field(default_factory=dict)
    """`seconds`, `peak_gb` and `coverage_frac` of stage `embed`."""
    external: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Embeddings of all cells by models of other packages, `(n_obs, width)` float32, finite."""
    datasets: EvaluatedDatasets | None = None
    """All datasets of the evaluation, this one among them, for tasks that need several."""

    @cached_property
    def gene_columns(self) -> GeneColumns:
        """Columns of the dataset as rows of the model's vocabulary."""
        return match_columns(self.reader, self.model.vocabulary)

    @cached_property
    def levels(self) -> np.ndarray:
        """(n_obs, columns) int32: level codes of the obs columns that the model reads."""
        return read_levels(self.reader, self.model.network)

    @property
    def measured_genes(self) -> np.ndarray:
        """(M,) int64: rows of the model's vocabulary that the dataset has, ascending."""
        return self.gene_columns.known_genes

    @property
    def supervision_note(self) -> str | None:
        """Note after the model's name in tables and verdicts if it was trained with labels."""
        label = self.roles.get("label")
        if label is not None and str(label.name) in self.model.supervised_by:
            return f"supervised by this label ({label.name})"
        return self.model.supervision_note


class Skipped(Exception):
    """Raised by a task that does not apply to a dataset.

    The result then has the reason and the `figures`, its single values by name.
    """

    def __init__(self, reason: str, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.figures = dict(figures or {})


class Task:
    """Base of the built-in tasks; a class of a plug-in needs only `__init__` and `run`."""

    reads_cells = True  # False if the result does not depend on the dataset

    def __init__(self, config: Any) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Score the model on one dataset. Raises Skipped if the task does not apply to it, and
        DataError if a file or column that the user named cannot be used.
        """
        raise NotImplementedError

    def estimate_s(self, sizes: DatasetSizes) -> float | None:
        """CPU-seconds of `run` on a dataset of these sizes, on a core as in `cellmill.evaluate.seconds.sizes`;
        None if not known. It is read before the first task, and changes no result.
        """
        return None


def depends_on_dataset(task: Task) -> bool:
    """True unless `reads_cells` of the task is False; the class of a plug-in may lack it."""
    return getattr(task, "reads_cells", True)


def run_task(task: Task, context: Context) -> TaskResult:
    """Run a task on one dataset. The model's rows get the note `Context.supervision_note`, or the
    model's own in a task whose result does not depend on the dataset.
    """
    try:
        with threadpool_limits(1):  # sums in one order: the same scores on any number of cores
            result = task.run(context)
    except Skipped as skipped:
        return TaskResult(figures=skipped.figures, skipped=str(skipped))
    scope = context if depends_on_dataset(task) else context.model
    note = scope.supervision_note
    return result if note is None else add_supervision_note(result, note)


def add_supervision_note(result: TaskResult, note: str) -> TaskResult:
    """The result with `note` in the names of the model's rows, also in verdicts, differences, gaps and
    the confusion. `figures`, `tables` and `notes` keep the names without it.
    """
    new_names: dict[str, str] = {}
    rows = []
    for row in result.rows:
        method = row.method
        # by network, not by kind: most rows of kind variant, such as regressions in folds, use no model
        if method.kind == "model" or method.network == "trained":
            method = replace(method, supervised=note)
        new_names[row.method.name] = method.name
        rows.append(replace(row, method=method))

    def rename(name: str) -> str:
        # a verdict without a row, such as an objective's, is about the model
        return new_names.get(name, f"{name}, {note}")

    confusion = result.confusion
    if confusion is not None:
        confusion = replace(confusion, row=rename(confusion.row))
    gaps = [
        replace(gap, model=gap.model and replace(gap.model, name=rename(gap.model.name)))
        for gap in result.gaps
    ]
    return replace(
        result,
        rows=rows,
        verdicts=[replace(v, compared=rename(v.compared)) for v in result.verdicts],
        differences=[replace(d, compared=rename(d.compared)) for d in result.differences],
        confusion=confusion,
        gaps=gaps,
    )
