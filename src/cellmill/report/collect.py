"""Runs and corpora, read from their files for the page.

A file that no stage has written yet is None or empty, and the page says so. A damaged file is a
DataError that names it in one line. Lines of metrics.jsonl that are not whole are left out.
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

TRAINING_KEYS = ("fingerprint", "init_from", "model", "objective", "tokens", "seed", "ema_decay")
"""Keys of a model's config.json that are equal at all steps of a training."""


class UmapCells(NamedTuple):
    """Cells of one dataset in umap.tsv. Each column has a value for each cell.

    Rows would take ten times the memory.
    """

    x: "array[float]"  # coordinates, float64
    y: "array[float]"
    is_held_out: bytes  # 1 for a held-out cell, otherwise 0
    texts: Mapping[str, Sequence[str]]  # columns `label` and `batch`; empty texts if unknown


@dataclass(frozen=True)
class ReportedRun:
    """Contents of a run's files; None for an absent file."""

    name: str
    plan: PlanSchema | None  # plan.json
    status: StatusSchema | None  # train/status.json, or train/state.json while it trains
    run_record: RunRecordSchema | None  # train/run.json
    exported_model: ModelSchema | None  # model/config.json
    evaluation: Evaluation | None  # evaluate/metrics.json
    cost: CostSchema | None = None  # train/cost.json
    # whole lines of metrics.jsonl: JSON objects with a step
    logged: list[LoggedLineSchema] = field(default_factory=list)
    umap: dict[str, UmapCells] = field(default_factory=dict)  # evaluate/umap.tsv, by dataset
    # metrics.json of kept checkpoints, by step in ascending order
    checkpoint_evaluations: dict[int, Evaluation] = field(default_factory=dict)
    # tables of other packages, by dataset, then by package and version
    bridges: dict[str, dict[str, TaskResult]] = field(default_factory=dict)
    remake_commands: dict[str, str] = field(default_factory=dict)  # by file

    @property
    def options(self) -> OptionsSchema:
        """Resolved options; without values if train/run.json is absent."""
        return OptionsSchema() if self.run_record is None else self.run_record.options

    @property
    def totals(self) -> dict[str, float | None]:
        """Totals of the cost; empty if it is unknown."""
        return {} if self.cost is None else self.cost.totals

    @property
    def lowest_val_loss(self) -> float | None:
        """The lowest validation loss in metrics.jsonl, whichever checkpoint is the best."""
        losses = [line.val_loss for line in self.logged if line.val_loss is not None]
        return min(filter(isfinite, losses), default=None)

    @property
    def evaluated_model(self) -> ModelSchema:
        """The model that was evaluated; without values before an evaluation."""
        return _get_model(self.evaluation)

    @property
    def supervised_by(self) -> list[str]:
        """obs columns whose labels the run was trained with."""
        for source in (self.evaluated_model, self.exported_model, self.run_record):
            if source is not None and source.supervised_by is not None:
                return source.supervised_by
        return []

    @property
    def has_collapsed(self) -> bool:
        """True if the embedding of a run without labels varies in one direction only.

        A model of two labels may need only one direction, so this is False for every model that was
        trained with labels. Validations after the step of the evaluated model do not count.
        """
        last = self.evaluated_model.step
        effective_ranks = [
            line.effective_rank
            for line in self.logged
            if line.effective_rank is not None and (last is None or line.step <= last)
        ]
        return not self.supervised_by and bool(effective_ranks) and effective_ranks[-1] < COLLAPSED


@dataclass(frozen=True)
class ReportedCorpus:
    """Contents of a corpus's files; None for an absent file."""

    name: str
    qc_reports: list[QcSchema]  # of its datasets, sorted by file name
    manifest: ManifestSchema | None  # shards/manifest.json
    n_genes: int | None  # genes of the vocabulary
    # the cells from which the vocabulary's genes and medians were computed, in words
    vocabulary_cells: str | None = None
    remake_commands: dict[str, str] = field(default_factory=dict)  # by file


def list_results(runs: Iterable[ReportedRun]) -> list[tuple[ReportedRun, str, DatasetResult]]:
    """(run, name of the dataset, results) for each dataset of each evaluated run, run by run."""
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
    logged = []
    for line in read_lines(log):
        remedy = f"delete the line of step {line['step']}"
        logged.append(LoggedLineSchema.parse(log, line, remedy))
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
        logged=logged,
        umap=_read_umap_cells(folder / "evaluate" / "umap.tsv"),
        checkpoint_evaluations=_read_checkpoint_evaluations(folder, exported_model),
        bridges=_read_bridges(folder, evaluation),
        remake_commands=list_remake_commands("runs", folder),
    )


def _read_umap_cells(path: Path) -> dict[str, UmapCells]:
    """Cells of umap.tsv, by dataset."""
    columns = read_umap(path)
    cells = {}
    for dataset_name in dict.fromkeys(columns.dataset):
        is_in_dataset = [name == dataset_name for name in columns.dataset]
        labels = compress(columns.label, is_in_dataset)
        batches = compress(columns.batch, is_in_dataset)
        cells[dataset_name] = UmapCells(
            x=array("d", compress(columns.x, is_in_dataset)),
            y=array("d", compress(columns.y, is_in_dataset)),
            is_held_out=bytes(text == "1" for text in compress(columns.heldout, is_in_dataset)),
            # intern texts: equal ones share their memory
            texts={"label": [*map(sys.intern, labels)], "batch": [*map(sys.intern, batches)]},
        )
    return cells


def _read_evaluation(path: Path) -> Evaluation:
    """Read metrics.json and check the parts that `results` leaves untyped."""
    evaluation = results.read(path)
    ModelSchema.parse(path, evaluation.model)
    for dataset_result in evaluation.datasets.values():
        if dataset_result.genes is not None:
            GeneCoverageSchema.parse(path, dataset_result.genes)
    return evaluation


def _read_checkpoint_evaluations(
    folder: Path, exported_model: ModelSchema | None
) -> dict[int, Evaluation]:
    """metrics.json of kept checkpoints, by step in ascending order.

    Checkpoints that were trained otherwise than the exported model are left out (TRAINING_KEYS).
    """
    exported_model = exported_model or ModelSchema()
    by_step: dict[int, Evaluation] = {}
    for path in folder.glob("steps/[1-9]*/evaluate/metrics.json"):
        config = path.parents[1] / "model" / "config.json"
        checkpoint = ModelSchema.read_if_present(config) or ModelSchema()
        evaluation = _read_evaluation(path)
        step = _get_model(evaluation).step
        is_of_training = _list_training(checkpoint) == _list_training(exported_model)
        if step is not None and is_of_training:
            by_step[step] = evaluation
    return dict(sorted(by_step.items()))


def _list_training(model: ModelSchema) -> list[Any]:
    return [model.content.get(key) for key in TRAINING_KEYS]


def _get_model(evaluation: Evaluation | None) -> ModelSchema:
    """The model that was evaluated; without values if `evaluation` is None."""
    return ModelSchema() if evaluation is None else ModelSchema(**evaluation.model)


def _read_bridges(folder: Path, evaluation: Evaluation | None) -> dict[str, dict[str, TaskResult]]:
    """Tables of other packages, by dataset, then by package and version.

    A table about another model than the evaluated one becomes a skipped result.
    """
    evaluated_digest = _get_model(evaluation).digest
    tables: dict[str, dict[str, TaskResult]] = defaultdict(dict)
    for path in sorted(folder.glob("bridges/*.json")):
        bridge = BridgeSchema.read(path)
        are_digests_known = None not in (bridge.model_digest, evaluated_digest)
        if are_digests_known and bridge.model_digest != evaluated_digest:
            table = TaskResult(skipped=f"{path.name} is of another model; make it again")
        else:
            table = _make_table(bridge.rows)
        tables[bridge.dataset][f"{bridge.package} {bridge.version}"] = table
    return tables


def _make_table(entries: Sequence[BridgeValueSchema]) -> TaskResult:
    """Table with a row for each method and a column for each metric, from one entry per value."""
    rows: dict[str, Row] = {}
    for entry in entries:
        row = rows.setdefault(entry.name, Row(ScoredMethod(entry.name, kind=entry.kind)))
        row.numbers[entry.metric] = entry.value
    return TaskResult([*rows.values()])


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
        remake_commands=list_remake_commands("corpora", folder),
    )


def _check_exists(folder: Path, kind: str) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder}: expected the folder of a {kind}, found none")
