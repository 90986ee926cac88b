"""Files of runs and corpora, read for the page, and the Snakemake commands that make them again.

Files that no stage has written yet are None or empty, and the page says so. A damaged file is a
DataError that names it in one line.
"""

import shlex
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import NamedTuple

from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.evaluate.inference.umap import read_umap
from cellmill.report.forms import (
    BridgeForm,
    CostForm,
    LoggedLineForm,
    ManifestForm,
    MeasuredGenesForm,
    ModelForm,
    OptionsForm,
    PlanForm,
    QcForm,
    RunRecordForm,
    StatusForm,
)
from cellmill.runs import results
from cellmill.runs.folder import COLLAPSED, read_lines
from cellmill.runs.results import Evaluation, Row, ScoredMethod, TaskResult

STATUS_FILE = "train/status.json"
FILES_BY_KIND = {
    "runs": (
        "plan.json",
        STATUS_FILE,
        "model/model.safetensors",
        "embeddings/*.h5ad",
        "predictions/*.h5ad",
        "changes/*.h5ad",
        "evaluate/metrics.json",
        "steps/*/evaluate/metrics.json",
        "bridges/*.json",
    ),
    "corpora": ("cells/*.h5ad", "vocabulary.tsv", "shards/manifest.json"),
}
"""Outputs of rules, in the order of the stages: Snakemake makes them again by name."""


class UmapCells(NamedTuple):
    """Cells of one dataset in umap.tsv, by column: rows would take ten times the memory."""

    x: "array[float]"
    y: "array[float]"
    is_held_out: bytes  # 1 for a held-out cell
    # `label` and `batch`, each with a text for each cell, empty if unknown
    texts: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class ReportedRun:
    """Files of a run; None if they are absent."""

    name: str
    plan: PlanForm | None  # plan.json
    status: StatusForm | None  # train/status.json, or train/state.json of a running training
    run_record: RunRecordForm | None  # train/run.json
    model: ModelForm | None  # config.json of the exported model
    evaluation: Evaluation | None
    cost: CostForm | None = None  # train/cost.json; None before a training has ended
    # metrics.jsonl, without an incomplete last line
    logged: list[LoggedLineForm] = field(default_factory=list)
    umap: dict[str, UmapCells] = field(default_factory=dict)  # by dataset
    # metrics.json of kept checkpoints by step
    checkpoint_evaluations: dict[int, Evaluation] = field(default_factory=dict)
    # tables of other packages by dataset, then by package and version
    bridges: dict[str, dict[str, TaskResult]] = field(default_factory=dict)
    remake_commands: dict[str, str] = field(default_factory=dict)  # by file

    @property
    def options(self) -> OptionsForm:
        """Resolved options; without values if train/run.json is absent."""
        return OptionsForm() if self.run_record is None else self.run_record.options

    @property
    def totals(self) -> dict[str, float | None]:
        """Totals of the cost; empty before a training has ended."""
        return {} if self.cost is None else self.cost.totals

    @property
    def evaluated_model(self) -> ModelForm:
        """The model that was evaluated; without values before an evaluation."""
        return ModelForm() if self.evaluation is None else ModelForm(**self.evaluation.model)

    @property
    def supervised_by(self) -> list[str]:
        """obs columns whose labels the run was trained with."""
        for source in (self.evaluated_model, self.model, self.run_record):
            if source is not None and source.supervised_by is not None:
                return source.supervised_by
        return []

    @property
    def has_collapsed(self) -> bool:
        """True if the embedding of a run without labels varies in one direction only.

        Two labels need no second direction, so models trained with labels count as not collapsed.
        """
        ranks = [line.effective_rank for line in self.logged if line.effective_rank is not None]
        return not self.supervised_by and bool(ranks) and ranks[-1] < COLLAPSED


@dataclass(frozen=True)
class ReportedCorpus:
    """Files of a corpus; None if they are absent."""

    name: str
    datasets: list[QcForm]  # QC reports, sorted by file name
    manifest: ManifestForm | None  # shards/manifest.json
    n_genes: int | None  # genes of the vocabulary
    # in words, the cells that the vocabulary's genes and medians were computed from
    vocabulary_cells: str | None = None
    remake_commands: dict[str, str] = field(default_factory=dict)  # by file


class RunOnDataset(NamedTuple):
    """A run's results on one dataset."""

    run: ReportedRun
    dataset: str
    results: dict[str, TaskResult]  # by task


def list_results(runs: Iterable[ReportedRun]) -> list[RunOnDataset]:
    """The results of each run on each dataset that it was evaluated on, run by run."""
    evaluated = []
    for run in runs:
        datasets = run.evaluation.datasets if run.evaluation else {}
        for name, dataset in datasets.items():
            evaluated.append(RunOnDataset(run, name, dataset.tasks))
    return evaluated


def read_run(folder: Path) -> ReportedRun:
    """The run in `folder`. Raises DataError if the folder is absent or one of its files is damaged."""
    _check_exists(folder, "run")
    train = folder / "train"
    logged = []
    for line in read_lines(train / "metrics.jsonl"):
        logged.append(LoggedLineForm.parse(train / "metrics.jsonl", line))
    metrics = folder / "evaluate" / "metrics.json"
    model = ModelForm.read(folder / "model" / "config.json")
    evaluation = _read_evaluation(metrics) if metrics.exists() else None
    return ReportedRun(
        name=folder.resolve().name,
        plan=PlanForm.read(folder / "plan.json"),
        status=StatusForm.read(folder / STATUS_FILE) or StatusForm.read(train / "state.json"),
        run_record=RunRecordForm.read(train / "run.json"),
        model=model,
        evaluation=evaluation,
        cost=CostForm.read(train / "cost.json"),
        logged=logged,
        umap=_read_umap_cells(folder / "evaluate" / "umap.tsv"),
        checkpoint_evaluations=_read_checkpoint_evaluations(folder, model),
        bridges=_read_bridges(folder, evaluation),
        remake_commands=list_remake_commands("runs", folder),
    )


def _read_umap_cells(path: Path) -> dict[str, UmapCells]:
    """Cells of umap.tsv by dataset."""
    columns = read_umap(path)
    cells = {}
    for dataset in dict.fromkeys(columns.dataset):
        is_of_dataset = [name == dataset for name in columns.dataset]
        heldout = compress(columns.heldout, is_of_dataset)
        label = compress(columns.label, is_of_dataset)
        batch = compress(columns.batch, is_of_dataset)
        cells[dataset] = UmapCells(
            x=array("d", compress(columns.x, is_of_dataset)),
            y=array("d", compress(columns.y, is_of_dataset)),
            is_held_out=bytes(map("1".__eq__, heldout)),
            # each text once in memory
            texts={"label": [*map(sys.intern, label)], "batch": [*map(sys.intern, batch)]},
        )
    return cells


def _read_evaluation(path: Path) -> Evaluation:
    evaluation = results.read(path)
    ModelForm.parse(path, evaluation.model)
    for dataset in evaluation.datasets.values():
        if dataset.genes is not None:
            MeasuredGenesForm.parse(path, dataset.genes)
    return evaluation


def _read_checkpoint_evaluations(folder: Path, model: ModelForm | None) -> dict[int, Evaluation]:
    """metrics.json of kept checkpoints by step, ascending. Checkpoints of another training than that
    of the exported `model` are left out.
    """
    fingerprint = model and model.fingerprint
    by_step: dict[int, Evaluation] = {}
    for path in folder.glob("steps/[1-9]*/evaluate/metrics.json"):
        checkpoint = ModelForm.read(path.parents[1] / "model" / "config.json")
        evaluation = _read_evaluation(path)
        is_of_training = (checkpoint and checkpoint.fingerprint) == fingerprint
        step = evaluation.model.get("step")
        if is_of_training and step is not None:
            by_step[step] = evaluation
    return dict(sorted(by_step.items()))


def _read_bridges(folder: Path, evaluation: Evaluation | None) -> dict[str, dict[str, TaskResult]]:
    """Tables of other packages by dataset, then by package and version.

    A table of another model than `evaluation` is skipped.
    """
    evaluated_digest = None if evaluation is None else evaluation.model.get("digest")
    tables: dict[str, dict[str, TaskResult]] = defaultdict(dict)
    for path in sorted(folder.glob("bridges/*.json")):
        form = BridgeForm.read(path)
        assert form is not None
        rows: dict[str, Row] = {}
        for entry in form.rows:
            row = rows.setdefault(entry.name, Row(ScoredMethod(entry.name, kind=entry.kind)))
            row.numbers[entry.metric] = entry.value
        table = TaskResult([*rows.values()])
        if form.model_digest and evaluated_digest and form.model_digest != evaluated_digest:
            table = TaskResult(skipped=f"{path.name} is of another model; make it again")
        tables[form.dataset][f"{form.package} {form.version}"] = table
    return tables


def read_corpus(folder: Path) -> ReportedCorpus:
    """The corpus in `folder`. Raises DataError if the folder is absent or one of its files is
    damaged.
    """
    _check_exists(folder, "corpus")
    datasets = []
    for path in sorted((folder / "cells").glob("*.json")):
        report = QcForm.read(path)
        if report is not None:
            datasets.append(report)
    path = folder / "vocabulary.tsv"
    vocabulary = Vocabulary.read(path) if path.exists() else None
    return ReportedCorpus(
        name=folder.resolve().name,
        datasets=datasets,
        manifest=ManifestForm.read(folder / "shards" / "manifest.json"),
        n_genes=None if vocabulary is None else vocabulary.n_genes,
        vocabulary_cells=None if vocabulary is None else str(vocabulary.training or "all cells"),
        remake_commands=list_remake_commands("corpora", folder),
    )


def _check_exists(folder: Path, kind: str) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder}: expected the folder of a {kind}, found none")


def list_remake_commands(kind: str, folder: Path) -> dict[str, str]:
    """The command that makes each file of `folder`, a folder in results/<kind>, again, by file.

    A stage with `--force` runs again although its file exists. A finished training runs again only
    if its folder is gone, so it is moved: no command loses trained weights.
    """
    results_folder = Path("results", kind, folder.resolve().name)
    train = shlex.quote(f"{results_folder}/train")
    commands = {}
    for pattern in FILES_BY_KIND[kind]:
        for path in sorted(folder.glob(pattern)):
            file = path.relative_to(folder).as_posix()
            target = shlex.quote(f"{results_folder}/{file}")
            if file == STATUS_FILE:
                move = f"mv {train} {train}.old"
                commands[file] = f"{move} && snakemake --profile PROFILE {target}"
            else:
                commands[file] = f"snakemake --profile PROFILE --force {target}"
    return commands
