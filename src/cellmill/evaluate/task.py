"""Contract of an evaluation task.

A task is a class `Task(config)`, named by the `implementation` of its options (`cellmill.config.evaluate.TaskConfig`).
Stage `evaluate` calls `run` once per dataset and writes what it returns to metrics.json; the report shows any task.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pandas as pd
import scipy.sparse as sp
from sklearn.decomposition import PCA

from cellmill.config.evaluate import Evaluate, TaskConfig
from cellmill.config.tokens import Tokens
from cellmill.data.count_matrix import log_normalise, summed
from cellmill.data.counts_reader import CountsReader
from cellmill.data.manifest import Manifest
from cellmill.data.vocabulary import Vocabulary
from cellmill.evaluate.baseline_cache import BaselineCache
from cellmill.evaluate.evaluated_datasets import EvaluatedDatasets
from cellmill.evaluate.training_cells import read_gene_statistics, read_training_counts
from cellmill.models.build import build
from cellmill.models.export import initial_tensors, spec_of
from cellmill.models.family import Model
from cellmill.models.objective import GeneStatistics
from cellmill.parallel.materialize import materialize
from cellmill.runs.verdict import Verdict, sentence

PCA_CELLS, COMPONENTS = 10_000, 50
TOKEN_BUDGET = 16_384  # tokens in one forward pass of a task; results do not depend on it


@dataclass(frozen=True)
class EvaluatedModel:
    """The exported model, and what can be derived from it and its training shards."""

    network: Model  # in eval mode, on its device
    config: dict[str, Any]  # its config.json
    vocabulary: Vocabulary
    tokens: Tokens
    manifest: Manifest  # of its training corpus
    seed: int

    @property
    def supervised_by(self) -> list[str]:
        """obs columns whose labels the model, or the model that it started from, was trained with."""
        return sorted({*self.network.objective.config.supervised_by, *self.config.get("supervised_by", [])})

    @cached_property
    def untrained(self) -> Model:
        """The same architecture with initial weights of `seed`, in eval mode, on the same device."""
        model = build(spec_of(self.config, self.vocabulary.n_genes)).to_empty(device="cpu")
        device = next(self.network.parameters()).device
        materialize(model, device, initial_tensors(model, self.seed, None, self.vocabulary))
        return model.eval()

    @cached_property
    def gene_statistics(self) -> GeneStatistics:
        return read_gene_statistics(self.manifest, self.tokens)

    @cached_property
    def components(self) -> PCA:
        """Principal components of log-normalised training cells, which several tasks compare with."""
        profiles = self.training_profiles()
        n_components = max(1, min(COMPONENTS, *(size - 1 for size in profiles.shape)))
        return PCA(n_components, svd_solver="arpack", random_state=0).fit(profiles)

    def training_profiles(self) -> sp.csr_matrix:
        """Log-normalised training cells, at most PCA_CELLS, `(cells, genes)` float32; read again at each call."""
        counts = read_training_counts(self.manifest, PCA_CELLS)[:PCA_CELLS]
        return log_normalise(summed(counts) if self.manifest.ordered else counts)


@dataclass(frozen=True)
class Context:
    """One dataset under evaluation."""

    dataset: str
    reader: CountsReader
    scored: np.ndarray
    """Cells to judge on, `(n_obs,)` bool: unseen in training unless `options.cells` is all, and with an embedding."""
    vectors: np.ndarray  # embeddings of all cells, `(n_obs, hidden)` float32; NaN rows for cells without a known gene
    roles: Mapping[str, pd.Series]
    """obs columns by role, with the column's name: `label`, `label 2`, ... and `batch`, `donor`, `condition`,
    `perturbation`, `dose` and `is_control` (bool). Roles that the dataset lacks are absent."""
    model: EvaluatedModel
    options: Evaluate  # options that all tasks share: `folds`, `seed`, `cells`
    baselines: BaselineCache = field(default_factory=BaselineCache)
    embedding_cost: Mapping[str, float] | None = None
    """`seconds` and `peak_gb` of stage `embed`; None for an embedding of an earlier version."""
    external: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Embeddings of all cells by models of other packages, `(n_obs, width)` float32, finite; `evaluate.external`."""
    datasets: EvaluatedDatasets | None = None
    """All datasets of the evaluation, this one among them, for tasks that need several."""

    @property
    def supervised(self) -> str | None:
        """Addition to the model's name in tables and verdicts if it was trained with labels."""
        columns = self.model.supervised_by
        if not columns:
            return None
        label = self.roles.get("label")
        if label is not None and str(label.name) in columns:
            return f"supervised by this label ({label.name})"
        return f"supervised by {', '.join(columns)}"


@dataclass(frozen=True)
class TaskResult:
    """Result of a task on one dataset: plain numbers, text, lists and mappings; None for a missing number, not NaN."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """Table: `name`, optionally `kind` ("model", "baseline", "external" or "ceiling"), then one key per column.
    `x_mean` and `x_sd` are shown as one column `x`; lists are kept in metrics.json and not shown."""
    metric: str | None = None
    """Column that ranks the rows, higher is better: drawn as a figure, and compared between runs."""
    verdicts: list[Verdict] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)  # single values beside the table
    skipped: str | None = None  # reason why the task does not apply to the dataset
    differences: list[dict[str, Any]] = field(default_factory=list)
    """Paired differences with their intervals (`evaluate.score_table.differences`): in metrics.json, not shown."""
    confusion: dict[str, Any] | None = None
    """Of one `row`: `classes`, and `counts` of cells, a list by true class of lists by predicted class."""

    notes: list[str] = field(default_factory=list)
    """Sentences shown behind those of the verdicts, such as on cells that are not judged."""

    def to_json(self) -> dict[str, Any]:
        """The task's entry in metrics.json."""
        entry = asdict(self)
        for verdict in entry["verdicts"]:
            if verdict["n"] is None:
                del verdict["n"]
        return entry | {"sentences": [*map(sentence, self.verdicts), *entry.pop("notes")]}


def supervised_name(name: str, supervised: str | None) -> str:
    """Name of a row of the model, with `supervised` behind its features if there is any."""
    features, plus, classifier = name.partition(" + ")
    return name if supervised is None else f"{features}, {supervised}{plus}{classifier}"


def named_supervised(result: TaskResult, supervised: str | None) -> TaskResult:
    """Return the result with `supervised` behind the name of the model in rows, verdicts and differences."""
    if supervised is None:
        return result
    others = {row["name"] for row in result.rows if row.get("kind") != "model"}

    def named(name: str) -> str:
        return name if name in others else supervised_name(name, supervised)

    rows = [row | {"name": named(row["name"])} for row in result.rows]
    verdicts = [replace(verdict, compared=named(verdict.compared)) for verdict in result.verdicts]
    differences = [line | {"compared": named(line["compared"])} for line in result.differences]
    confusion = result.confusion and result.confusion | {"row": named(result.confusion["row"])}
    return replace(result, rows=rows, verdicts=verdicts, differences=differences, confusion=confusion)


class Task(Protocol):
    def __init__(self, config: TaskConfig) -> None: ...

    def run(self, context: Context) -> TaskResult:
        """Judge the model on one dataset. Raises DataError where the user named something unusable."""
        ...
