"""Runs and corpora, read from their files for the page.

If no stage has written a file yet, its content is None or empty here, and the page says so. A
damaged file raises DataError, with one line that names the file. Lines of metrics.jsonl that are
not whole are left out.
"""

import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.evaluate.inference.umap import read_umap
from cellmill.report.remake_commands import find_folder_name, list_remake_commands
from cellmill.report.schemas import (
    BridgeSchema,
    BridgeValueSchema,
    CostSchema,
    GeneCoverageSchema,
    LoggedLineSchema,
    ManifestSchema,
    ModelSchema,
    OptionsSchema,
    PlanSchema,
    QcSchema,
    RunRecordSchema,
    StatusSchema,
)
from cellmill.runs import results
from cellmill.runs.collapse import COLLAPSED
from cellmill.runs.folder import read_lines
from cellmill.runs.results import DatasetResult, Evaluation, Row, ScoredMethod, TaskResult

TRAINING_KEYS = (
    "fingerprint",
    "init_from",
    "model",
    "objective",
    "tokens",
    "seed",
    "ema_decay",
    "weighted_by",
)
"""Keys of a model's config.json that are equal at all steps of one training.

config.json has no learning rate, batch size or schedule. Two trainings that differ only in these
have equal values of all keys.
"""


class UmapCells(NamedTuple):
    """Cells of one dataset in umap.tsv, stored by column. Each column has one value per cell.

    An object per cell would take ten times the memory.
    """

    x: "array[float]"  # (cells,) float64, first coordinate
    y: "array[float]"  # (cells,) float64, second coordinate
    is_held_out: bytes  # (cells,), 1 for a held-out cell, otherwise 0
    # labels and batches of the cells, by column (`label` or `batch`). A text is empty if the cell's
    # label or batch is unknown.
    texts_by_column: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class ReportedRun:
    """Contents of a run's files. A field is None or empty if its file is absent."""

    name: str
    plan: PlanSchema | None  # plan.json
    # train/status.json; train/state.json if that is absent, as it is during training
    status: StatusSchema | None
    run_record: RunRecordSchema | None  # train/run.json
    exported_model: ModelSchema | None  # model/config.json
    evaluation: Evaluation | None  # evaluate/metrics.json
    cost: CostSchema | None = None  # train/cost.json
    # whole lines of train/metrics.jsonl; each is a JSON object with a step
    logged_lines: list[LoggedLineSchema] = field(default_factory=list)
    # cells in evaluate/umap.tsv, by dataset
    umap_by_dataset: dict[str, UmapCells] = field(default_factory=dict)
    # metrics.json of each evaluated checkpoint, by step in ascending order
    evaluation_by_step: dict[int, Evaluation] = field(default_factory=dict)
    # tables of other packages (bridges/*.json), by dataset, then by package and version
    bridges_by_dataset: dict[str, dict[str, TaskResult]] = field(default_factory=dict)
    # Snakemake command that makes a file of the run again, by file
    remake_command_by_file: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> OptionsSchema:
        """Resolved options of the run. They have no values if train/run.json is absent."""
        return OptionsSchema() if self.run_record is None else self.run_record.options

    @property
    def totals(self) -> dict[str, float | None]:
        """Totals of the cost, by quantity. Empty if train/cost.json is absent."""
        return {} if self.cost is None else self.cost.totals

    @property
    def lowest_val_loss(self) -> float | None:
        """The lowest finite validation loss in metrics.jsonl; None if there is none.

        Another metric may have chosen another checkpoint as the best.
        """
        losses = [line.val_loss for line in self.logged_lines if line.val_loss is not None]
        return min(filter(isfinite, losses), default=None)

    @property
    def evaluated_model(self) -> ModelSchema:
        """Description of the model that was evaluated. It has no values before an evaluation."""
        return _get_model(self.evaluation)

    @property
    def supervised_by(self) -> list[str]:
        """obs columns of the labels that the run was trained with. Empty if it used no labels."""
        for source in (self.evaluated_model, self.exported_model, self.run_record):
            if source is not None and source.supervised_by is not None:
                return source.supervised_by
        return []

    @property
    def has_collapsed(self) -> bool:
        """True if the embedding of a run without labels varies almost only in one direction.

        The last validation up to the step of the evaluated model decides. The property is False for
        every run that was trained with labels, because two labels may need only one direction.
        """
        if self.supervised_by:
            return False
        last_step = self.evaluated_model.step
        effective_ranks = [
            line.effective_rank
            for line in self.logged_lines
            if line.effective_rank is not None and (last_step is None or line.step <= last_step)
        ]
        return bool(effective_ranks) and effective_ranks[-1] < COLLAPSED


@dataclass(frozen=True)
class ReportedCorpus:
    """Contents of a corpus's files. A field is None or empty if its file is absent."""

    name: str
    qc_reports: list[QcSchema]  # cells/*.json, one report per dataset, sorted by file name
    manifest: ManifestSchema | None  # shards/manifest.json
    n_genes: int | None  # number of genes in the vocabulary
    # words for the cells from which the vocabulary's genes and medians were computed
    vocabulary_cells: str | None = None
    # Snakemake command that makes a file of the corpus again, by file
    remake_command_by_file: dict[str, str] = field(default_factory=dict)


def list_results(runs: Iterable[ReportedRun]) -> list[tuple[ReportedRun, str, DatasetResult]]:
    """List (run, name of the dataset, results on it) for each dataset of each evaluated run."""
    run_results = []
    for run in runs:
        datasets = run.evaluation.datasets if run.evaluation else {}
        for dataset_name, dataset_result in datasets.items():
            run_results.append((run, dataset_name, dataset_result))
    return run_results


def read_run(folder: Path) -> ReportedRun:
    """Read the run in `folder`. Raise DataError if the folder is absent or a file is damaged."""
    _check_exists(folder, "run")
    train = folder / "train"
    log = train / "metrics.jsonl"
    logged_lines = []
    for line in read_lines(log):
        remedy = f"delete the line of step {line['step']}"
        logged_lines.append(LoggedLineSchema.parse(log, line, remedy))
    metrics = folder / "evaluate" / "metrics.json"
    exported_model = ModelSchema.read_if_present(folder / "model" / "config.json")
    evaluation = _read_evaluation(metrics) if metrics.exists() else None
    return ReportedRun(
        name=find_folder_name(folder),
        plan=PlanSchema.read_if_present(folder / "plan.json"),
        status=StatusSchema.read_if_present(train / "status.json")
        or StatusSchema.read_if_present(train / "state.json"),
        run_record=RunRecordSchema.read_if_present(train / "run.json"),
        exported_model=exported_model,
        evaluation=evaluation,
        cost=CostSchema.read_if_present(train / "cost.json"),
        logged_lines=logged_lines,
        umap_by_dataset=_read_umap_cells(folder / "evaluate" / "umap.tsv"),
        evaluation_by_step=_read_checkpoint_evaluations(folder, exported_model),
        bridges_by_dataset=_read_bridges(folder, evaluation),
        remake_command_by_file=list_remake_commands("runs", folder),
    )


def _read_umap_cells(path: Path) -> dict[str, UmapCells]:
    """Read the cells of umap.tsv, by dataset. Empty if the file is absent."""
    columns = read_umap(path)
    cells_by_dataset = {}
    for dataset_name in dict.fromkeys(columns.dataset):
        is_in_dataset = [name == dataset_name for name in columns.dataset]
        labels = compress(columns.label, is_in_dataset)
        batches = compress(columns.batch, is_in_dataset)
        cells_by_dataset[dataset_name] = UmapCells(
            x=array("d", compress(columns.x, is_in_dataset)),
            y=array("d", compress(columns.y, is_in_dataset)),
            is_held_out=bytes(text == "1" for text in compress(columns.heldout, is_in_dataset)),
            # interned texts that are equal share their memory
            texts_by_column={
                "label": [*map(sys.intern, labels)],
                "batch": [*map(sys.intern, batches)],
            },
        )
    return cells_by_dataset


def _read_evaluation(path: Path) -> Evaluation:
    """Read metrics.json. Also check the model and the genes, which `results.read` does not check."""
    evaluation = results.read(path)
    ModelSchema.parse(path, evaluation.model)
    for dataset_result in evaluation.datasets.values():
        if dataset_result.genes is not None:
            GeneCoverageSchema.parse(path, dataset_result.genes)
    return evaluation


def _read_checkpoint_evaluations(
    folder: Path, exported_model: ModelSchema | None
) -> dict[int, Evaluation]:
    """Read metrics.json of each evaluated checkpoint, by step in ascending order.

    A checkpoint is left out if it has another value of one of TRAINING_KEYS than the exported model.
    Such a checkpoint is from an earlier training of the run.
    """
    training_values = _list_training_values(exported_model or ModelSchema())
    evaluation_by_step: dict[int, Evaluation] = {}
    for path in folder.glob("steps/[1-9]*/evaluate/metrics.json"):
        config = path.parents[1] / "model" / "config.json"
        checkpoint = ModelSchema.read_if_present(config) or ModelSchema()
        evaluation = _read_evaluation(path)
        step = _get_model(evaluation).step
        if step is not None and _list_training_values(checkpoint) == training_values:
            evaluation_by_step[step] = evaluation
    return dict(sorted(evaluation_by_step.items()))


def _list_training_values(model: ModelSchema) -> list[Any]:
    """Values of TRAINING_KEYS in a model's config.json, in the order of the keys; None if absent."""
    return [model.content.get(key) for key in TRAINING_KEYS]


def _get_model(evaluation: Evaluation | None) -> ModelSchema:
    """Description of the model that was evaluated. It has no values if `evaluation` is None."""
    return ModelSchema() if evaluation is None else ModelSchema(**evaluation.model)


def _read_bridges(folder: Path, evaluation: Evaluation | None) -> dict[str, dict[str, TaskResult]]:
    """Read the tables of other packages, by dataset, then by package and version.

    A table of a model that is not the evaluated model is not shown. Its place has a skipped result.
    """
    evaluated_digest = _get_model(evaluation).digest
    tables_by_dataset: dict[str, dict[str, TaskResult]] = defaultdict(dict)
    for path in sorted(folder.glob("bridges/*.json")):
        bridge = BridgeSchema.read(path)
        are_digests_known = None not in (bridge.model_digest, evaluated_digest)
        if are_digests_known and bridge.model_digest != evaluated_digest:
            table = TaskResult(skipped=f"{path.name} is of another model; make it again")
        else:
            table = _make_table(bridge.rows)
        tables_by_dataset[bridge.dataset][f"{bridge.package} {bridge.version}"] = table
    return tables_by_dataset


def _make_table(entries: Sequence[BridgeValueSchema]) -> TaskResult:
    """Make a table with a row per method and a column per metric. Each entry is one of the values."""
    row_by_name: dict[str, Row] = {}
    for entry in entries:
        row = row_by_name.setdefault(entry.name, Row(ScoredMethod(entry.name, kind=entry.kind)))
        row.numbers[entry.metric] = entry.value
    return TaskResult([*row_by_name.values()])


def read_corpus(folder: Path) -> ReportedCorpus:
    """Read the corpus in `folder`. Raise DataError if the folder is absent or a file is damaged."""
    _check_exists(folder, "corpus")
    qc_paths = sorted((folder / "cells").glob("*.json"))
    vocabulary_path = folder / "vocabulary.tsv"
    vocabulary = Vocabulary.read(vocabulary_path) if vocabulary_path.exists() else None
    return ReportedCorpus(
        name=find_folder_name(folder),
        qc_reports=[QcSchema.read(path) for path in qc_paths],
        manifest=ManifestSchema.read_if_present(folder / "shards" / "manifest.json"),
        n_genes=None if vocabulary is None else vocabulary.n_genes,
        vocabulary_cells=None if vocabulary is None else str(vocabulary.training or "all cells"),
        remake_command_by_file=list_remake_commands("corpora", folder),
    )


def _check_exists(folder: Path, kind: str) -> None:
    """Raise DataError if `folder` is absent. `kind` is run or corpus."""
    if not folder.is_dir():
        raise DataError(f"{folder}: expected the folder of a {kind}, found none")
