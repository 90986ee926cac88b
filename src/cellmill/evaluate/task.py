"""Contract of an evaluation task.

The options of a task (`config.parts.tasks.TaskConfig`) name its class, in `implementation`. Stage
`evaluate` calls `run` once for each dataset. If the task reads a label, the stage also calls `run` for
each further label of the dataset.

A result of an earlier call that still holds is read from a file instead (`finished.py`). So a task that
reads no cells runs for the first dataset only. The stage writes all results to metrics.json, and the
report shows the results of any task.
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
    """Cells to score, `(n_obs,)` bool: held-out cells that have an embedding. If `options.cells` is
    all, they are all cells that have an embedding.
    """
    vectors: np.ndarray
    """Embeddings of all cells, `(n_obs, hidden)` float32. A cell without a known gene has NaN."""
    roles: Mapping[str, pd.Series]
    """obs columns by role. A series has the name of its column. Roles are `label`, `label 2` and so on,
    `batch`, `donor`, `condition`, `perturbation`, `dose`, and `is_control` (bool). Roles that the dataset
    lacks are absent.
    """
    model: EvaluatedModel
    options: Evaluate
    """Section `evaluate`."""
    prediction_cache: PredictionCache = field(default_factory=PredictionCache)
    """Predictions of baselines that were computed before, by this or by an earlier evaluation."""
    feature_cache: FeatureCache = field(default_factory=FeatureCache)
    """Features of the cells that the previous task read."""
    embedding_cost: Mapping[str, float] = field(default_factory=dict)
    """`seconds`, `peak_gb` and `coverage_frac` of stage `embed`."""
    external: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Embeddings of all cells by models of other packages, by name: `(n_obs, width)` float32, finite."""
    datasets: EvaluatedDatasets | None = None
    """All datasets of the evaluation, including this one, for tasks that need several datasets."""

    @cached_property
    def gene_columns(self) -> GeneColumns:
        """The row of the model's vocabulary for each column of the dataset."""
        return match_columns(self.reader, self.model.vocabulary)

    @cached_property
    def levels(self) -> np.ndarray:
        """Level codes of the obs columns that the model reads, (n_obs, columns) int32."""
        return read_levels(self.reader, self.model.network)

    @property
    def measured_genes(self) -> np.ndarray:
        """Rows of the model's vocabulary that the dataset measures, (genes,) int64, ascending."""
        return self.gene_columns.known_genes

    @property
    def supervision_note(self) -> str | None:
        """Note after the name of the model in tables and verdicts; None if it was trained without labels.

        The note says whether the model was trained with the label of this dataset, or with other labels.
        """
        label = self.roles.get("label")
        if label is not None and str(label.name) in self.model.supervised_by:
            return f"supervised by this label ({label.name})"
        return self.model.supervision_note


class Skipped(Exception):
    """Raised by a task that does not apply to a dataset.

    The result of the task then has the `reason` and the `figures`, which are values by name.
    """

    def __init__(self, reason: str, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.figures = dict(figures or {})


class Task:
    """Base class of the built-in tasks. The class of a plug-in needs only `__init__` and `run`."""

    reads_cells = True  # False if the result is the same for all datasets

    def __init__(self, config: Any) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Score the model on one dataset.

        Raises Skipped if the task does not apply to the dataset. Raises DataError if a file or a column
        that the user named cannot be used.
        """
        raise NotImplementedError

    def estimate_s(self, sizes: DatasetSizes) -> float | None:
        """Estimate the CPU-seconds of `run` on a dataset of these `sizes`; None if they are not known.

        `cellmill.evaluate.seconds.sizes` says which core the seconds are for. The estimate is made before
        the first task runs, and changes no result.
        """
        return None


def depends_on_dataset(task: Task) -> bool:
    """True unless `reads_cells` of the task is False. The class of a plug-in may lack that attribute."""
    return getattr(task, "reads_cells", True)


def run_task(task: Task, context: Context) -> TaskResult:
    """Run a task on one dataset, and return its result.

    If the model was trained with labels, the rows of the model get a note that says so. The note is about
    the label of the dataset, unless the result does not depend on the dataset.
    """
    try:
        # one thread sums in a fixed order, so scores are the same on any number of cores
        with threadpool_limits(1):
            result = task.run(context)
    except Skipped as skipped:
        return TaskResult(figures=skipped.figures, skipped=str(skipped))
    noted = context if depends_on_dataset(task) else context.model
    note = noted.supervision_note
    return result if note is None else add_supervision_note(result, note)


def add_supervision_note(result: TaskResult, note: str) -> TaskResult:
    """Return the result with `note` added to the names of the model's rows.

    The names also change in verdicts, differences, gaps and the confusion. They do not change in `figures`,
    `tables` and `notes`.
    """
    new_names: dict[str, str] = {}  # by earlier name
    rows = []
    for row in result.rows:
        method = row.method
        # Variants of the model are found by their network. Their kind does not tell: most rows of kind
        # variant, such as regressions in folds, use no model.
        if method.kind == "model" or method.network == "trained":
            method = replace(method, supervised=note)
        new_names[row.method.name] = method.name
        rows.append(replace(row, method=method))

    def rename(name: str) -> str:
        # a name that no row has, such as in a verdict of an objective, stands for the model
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
