"""Files of runs and corpora, read for the page, and the Snakemake commands that make them again.

Files that no stage has written yet are None or empty, and the page says so. Each file is checked
once, when it is read, for what the page takes from it; a damaged file is a DataError that names it
in one line.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from cellmill.config.section import error_line, explain
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.evaluate.inference.umap import read_umap
from cellmill.files import read_json
from cellmill.runs import results
from cellmill.runs.cost import Start
from cellmill.runs.folder import read_lines
from cellmill.runs.results import DatasetResult, Evaluation

REMADE = {
    "runs": (
        "plan.json",
        "train/status.json",
        "model/model.safetensors",
        "embeddings/*.h5ad",
        "predictions/*.h5ad",
        "changes/*.h5ad",
        "evaluate/metrics.json",
        "steps/*/evaluate/metrics.json",
    ),
    "corpora": ("cells/*.h5ad", "vocabulary.tsv", "shards/manifest.json"),
}
"""Files that Snakemake makes again by name, in the order of the stages."""

Object = dict[str, Any]

# A form lists the keys that the page reads from a file. Keys with a default may be absent.


class PlanForm(BaseModel):
    """plan.json."""

    memory: Object = {}


class StatusForm(BaseModel):
    """train/status.json, and train/state.json."""

    wall_s: float | None = None
    best_val_loss: float | None = None


class RecordForm(BaseModel):
    """train/run.json, and config.json of an exported model."""

    options: Object = {}
    environment: Object = {}
    supervised_by: list[str] = []


class CostForm(BaseModel):
    """train/cost.json."""

    source: str
    jobs: list[Start]
    totals: dict[str, float | None]
    unknown: dict[str, str]


class MetricsLineForm(BaseModel):
    """A line of metrics.jsonl."""

    peak_allocated_gb: list[float] = []
    peak_resident_gb: list[float] = []
    gpu_power_w: list[float] = []
    cells_per_s: float = 0.0
    data_wait_frac: float = 0.0
    effective_rank: float | None = None


class QcForm(BaseModel):
    """QC report of a dataset."""

    dataset: str
    source: Object
    cells: Object
    genes: Object
    coverage: Object
    histograms: dict[str, dict[str, list[float]]]


class ManifestForm(BaseModel):
    """shards/manifest.json."""

    fingerprint: str
    vocabulary: Object
    splits: dict[str, Object]


class SweepForm(BaseModel):
    """curves.json of a sweep."""

    name: str
    n_runs: int
    axes: list[str]
    curves: list[Object]


def list_remake_commands(kind: str, folder: Path) -> dict[str, str]:
    """Commands by file of `folder`, each of which makes the file again. The folder is one of
    results/<kind>.

    A stage with `--force` runs again although its file exists. A finished training runs again only
    if its folder is gone, so that no command loses trained weights.
    """
    target_folder = Path("results", kind, folder.resolve().name)
    train = shlex.quote(f"{target_folder}/train")
    commands = {}
    for pattern in REMADE[kind]:
        for path in sorted(folder.glob(pattern)):
            file = path.relative_to(folder).as_posix()
            target = shlex.quote(f"{target_folder}/{file}")
            commands[file] = f"snakemake --profile PROFILE --force {target}"
    finished = "train/status.json"
    if finished in commands:
        target = shlex.quote(f"{target_folder}/{finished}")
        commands[finished] = f"mv {train} {train}.old && snakemake --profile PROFILE {target}"
    return commands


@dataclass(frozen=True)
class ReportedRun:
    """Files of a run; None if they are absent."""

    name: str
    plan: Object | None  # plan.json
    status: Object | None  # train/status.json, or train/state.json of a running training
    run_record: Object | None  # train/run.json: resolved options, digests, environment
    model: Object | None  # config.json of the exported model
    evaluation: Evaluation | None
    cost: Object | None = None  # train/cost.json; None before a training has ended
    # metrics.jsonl, without an incomplete last line
    metric_lines: list[Object] = field(default_factory=list)
    # rows of umap.tsv by dataset
    umap: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    # metrics.json of kept checkpoints by step
    checkpoint_evaluations: dict[int, Evaluation] = field(default_factory=dict)
    remake_commands: dict[str, str] = field(default_factory=dict)  # commands that make files again

    @property
    def supervised_by(self) -> list[str]:
        """obs columns whose labels the run was trained with."""
        evaluated_model = self.evaluation and self.evaluation.model
        for source in (evaluated_model, self.model, self.run_record):
            if source and "supervised_by" in source:
                columns: list[str] = source["supervised_by"]
                return columns
        return []


@dataclass(frozen=True)
class ReportedCorpus:
    """Files of a corpus; None if they are absent."""

    name: str
    datasets: list[Object]  # QC reports, sorted by file name
    manifest: Object | None  # shards/manifest.json
    n_genes: int | None  # genes of the vocabulary
    # in words, the cells that the vocabulary's genes and medians were computed from
    vocabulary_cells: str | None = None
    remake_commands: dict[str, str] = field(default_factory=dict)  # commands that make files again


def read_run(folder: Path) -> ReportedRun:
    """The run in `folder`. Raises DataError if the folder is absent or one of its files is damaged."""
    _check_exists(folder, "run")
    train = folder / "train"
    umap = defaultdict(list)
    for row in read_umap(folder / "evaluate" / "umap.tsv"):
        umap[row["dataset"]].append(row)
    metric_lines = read_lines(train / "metrics.jsonl")
    for line in metric_lines:
        _check(train / "metrics.jsonl", MetricsLineForm, line)
    model = _read(folder / "model" / "config.json", RecordForm)
    checkpoint_evaluations = {}
    for path in folder.glob("steps/[1-9]*/evaluate/metrics.json"):
        checkpoint = _read(path.parents[1] / "model" / "config.json", RecordForm) or {}
        evaluation = results.read(path)
        # keep only checkpoints of the training that made the export
        if checkpoint.get("fingerprint") == (model or {}).get("fingerprint"):
            checkpoint_evaluations[evaluation.model["step"]] = evaluation
    metrics = folder / "evaluate" / "metrics.json"
    return ReportedRun(
        name=folder.resolve().name,
        plan=_read(folder / "plan.json", PlanForm),
        status=_read(train / "status.json", StatusForm) or _read(train / "state.json", StatusForm),
        run_record=_read(train / "run.json", RecordForm),
        model=model,
        cost=_read(train / "cost.json", CostForm),
        evaluation=results.read(metrics) if metrics.exists() else None,
        metric_lines=metric_lines,
        umap=umap,
        checkpoint_evaluations=dict(sorted(checkpoint_evaluations.items())),
        remake_commands=list_remake_commands("runs", folder),
    )


def read_corpus(folder: Path) -> ReportedCorpus:
    """The corpus in `folder`. Raises DataError if the folder is absent or one of its files is
    damaged.
    """
    _check_exists(folder, "corpus")
    path = folder / "vocabulary.tsv"
    vocabulary = Vocabulary.read(path) if path.exists() else None
    return ReportedCorpus(
        name=folder.resolve().name,
        datasets=[
            _read(report, QcForm) or {} for report in sorted((folder / "cells").glob("*.json"))
        ],
        manifest=_read(folder / "shards" / "manifest.json", ManifestForm),
        n_genes=None if vocabulary is None else vocabulary.n_genes,
        vocabulary_cells=None if vocabulary is None else str(vocabulary.training or "all cells"),
        remake_commands=list_remake_commands("corpora", folder),
    )


def read_sweep(path: Path) -> Object:
    """curves.json of a sweep. Raises DataError if it is not as `sweep` writes it."""
    return _check(path, SweepForm, read_json(path))


def _read(path: Path, form: type[BaseModel]) -> Object | None:
    return _check(path, form, read_json(path)) if path.exists() else None


def _check(path: Path, form: type[BaseModel], value: Object) -> Object:
    """Return `value`, the content of `path`. Raises DataError if it does not match `form`.

    Keys that `form` does not have are allowed.
    """
    try:
        form.model_validate(value)
    except ValidationError as error:
        raise DataError(
            f"{path}: damaged: {error_line(*explain(error, form))}; make it again"
        ) from None
    return value


def _check_exists(folder: Path, kind: str) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder}: expected the folder of a {kind}, found none")


class EvaluatedDataset(NamedTuple):
    """A dataset that a run was evaluated on."""

    run: ReportedRun
    name: str
    result: DatasetResult


def evaluated_datasets(runs: Iterable[ReportedRun]) -> Iterator[EvaluatedDataset]:
    """Each dataset that the runs were evaluated on, run by run."""
    for run in runs:
        if run.evaluation is not None:
            for name, result in run.evaluation.datasets.items():
                yield EvaluatedDataset(run, name, result)
