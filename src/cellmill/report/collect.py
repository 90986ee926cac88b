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
from typing import Any

from pydantic import BaseModel, ValidationError, create_model

from cellmill.config.section import error_line, explain
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.evaluate.inference.umap import read_umap
from cellmill.files import read_json
from cellmill.runs import results
from cellmill.runs.cost import Start
from cellmill.runs.folder import read_lines
from cellmill.runs.results import DatasetResult, Evaluation

MADE = {  # files that Snakemake makes again by name, in the order of the stages
    "runs": (
        "plan.json", "train/status.json", "model/model.safetensors", "embeddings/*.h5ad", "predictions/*.h5ad",
        "changes/*.h5ad", "evaluate/metrics.json", "steps/*/evaluate/metrics.json",
    ),
    "corpora": ("cells/*.h5ad", "vocabulary.tsv", "shards/manifest.json"),
}  # fmt: skip

Object = dict[str, Any]

# forms of files: the keys that the page reads from each, with a default for those that may be absent
PROGRESS = create_model(  # plan.json, and train/status.json
    "Progress", memory=(Object, {}), wall_s=(float | None, None), best_val_loss=(float | None, None)
)
RECORD = create_model(  # train/run.json, and config.json of an exported model
    "Record", options=(Object, {}), environment=(Object, {}), supervised_by=(list[str], [])
)
COST = create_model(
    "Cost", source=(str, ...), jobs=(list[Start], ...), totals=(dict[str, float | None], ...),
    unknown=(dict[str, str], ...),
)  # fmt: skip
CURVE = create_model(  # a line of metrics.jsonl
    "Curve", peak_allocated_gb=(list[float], []), peak_resident_gb=(list[float], []), gpu_power_w=(list[float], []),
    cells_per_s=(float, 0.0), data_wait_frac=(float, 0.0), effective_rank=(float | None, None),
)  # fmt: skip
QC_REPORT = create_model(
    "QcReport", dataset=(str, ...), source=(Object, ...), cells=(Object, ...), genes=(Object, ...),
    coverage=(Object, ...), histograms=(dict[str, dict[str, list[float]]], ...),
)  # fmt: skip
MANIFEST = create_model(
    "Manifest", fingerprint=(str, ...), vocabulary=(Object, ...), splits=(dict[str, Object], ...)
)
SWEEP = create_model(
    "Sweep", name=(str, ...), n_runs=(int, ...), axes=(list[str], ...), curves=(list[Object], ...)
)


def remake_commands(kind: str, folder: Path) -> dict[str, str]:
    """Command that makes each file of `folder`, one of results/<kind>, again.

    A stage with `--force` runs again although its file exists. A finished training runs again only
    if its folder is gone, so that no command loses trained weights.
    """
    target_folder = Path("results", kind, folder.resolve().name)
    train = shlex.quote(f"{target_folder}/train")
    commands = {}
    for pattern in MADE[kind]:
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
    name: str
    plan: dict[str, Any] | None
    status: dict[str, Any] | None
    record: dict[str, Any] | None  # train/run.json: resolved options, digests, environment
    model: dict[str, Any] | None
    evaluation: Evaluation | None
    cost: dict[str, Any] | None = None  # train/cost.json; None before a training has ended
    # metrics.jsonl, without an incomplete last line
    lines: list[dict[str, Any]] = field(default_factory=list)
    # rows of umap.tsv by dataset
    umap: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    # metrics.json of kept checkpoints by step
    kept: dict[int, Evaluation] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)  # commands that make files again

    @property
    def supervised_by(self) -> list[str]:
        """obs columns whose labels the run was trained with."""
        evaluated = self.evaluation and self.evaluation.model
        for written in (evaluated, self.model, self.record):
            if written and "supervised_by" in written:
                columns: list[str] = written["supervised_by"]
                return columns
        return []


@dataclass(frozen=True)
class ReportedCorpus:
    name: str
    datasets: list[dict[str, Any]]  # QC reports, by name
    manifest: dict[str, Any] | None
    n_genes: int | None  # genes of the vocabulary
    vocabulary_cells: str | None = None  # cells that chose these genes and gave their medians
    commands: dict[str, str] = field(default_factory=dict)  # commands that make files again


def read_run(folder: Path) -> ReportedRun:
    """The run in `folder`. Raises DataError if the folder is absent or one of its files is damaged."""
    train = _existing(folder, "run") / "train"
    umap = defaultdict(list)
    for row in read_umap(folder / "evaluate" / "umap.tsv"):
        umap[row["dataset"]].append(row)
    lines = read_lines(train / "metrics.jsonl")
    for line in lines:
        _check(train / "metrics.jsonl", CURVE, line)
    model = _read(folder / "model" / "config.json", RECORD)
    kept = {}
    for path in folder.glob("steps/[1-9]*/evaluate/metrics.json"):
        checkpoint = _read(path.parents[1] / "model" / "config.json", RECORD) or {}
        evaluation = results.read(path)
        # keep only checkpoints of the training that made the export
        if checkpoint.get("fingerprint") == (model or {}).get("fingerprint"):
            kept[evaluation.model["step"]] = evaluation
    metrics = folder / "evaluate" / "metrics.json"
    return ReportedRun(
        name=folder.resolve().name,
        plan=_read(folder / "plan.json", PROGRESS),
        status=_read(train / "status.json", PROGRESS) or _read(train / "state.json", PROGRESS),
        record=_read(train / "run.json", RECORD),
        model=model,
        cost=_read(train / "cost.json", COST),
        evaluation=results.read(metrics) if metrics.exists() else None,
        lines=lines,
        umap=umap,
        kept=dict(sorted(kept.items())),
        commands=remake_commands("runs", folder),
    )


def read_corpus(folder: Path) -> ReportedCorpus:
    """The corpus in `folder`. Raises DataError if the folder is absent or one of its files is
    damaged.
    """
    path = _existing(folder, "corpus") / "vocabulary.tsv"
    vocabulary = Vocabulary.read(path) if path.exists() else None
    return ReportedCorpus(
        name=folder.resolve().name,
        datasets=[
            _read(path, QC_REPORT) or {} for path in sorted((folder / "cells").glob("*.json"))
        ],
        manifest=_read(folder / "shards" / "manifest.json", MANIFEST),
        n_genes=None if vocabulary is None else vocabulary.n_genes,
        vocabulary_cells=None if vocabulary is None else str(vocabulary.training or "all cells"),
        commands=remake_commands("corpora", folder),
    )


def read_sweep(path: Path) -> Object:
    """curves.json of a sweep. Raises DataError if it is not as `sweep` writes it."""
    return _check(path, SWEEP, read_json(path))


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


def _existing(folder: Path, kind: str) -> Path:
    if not folder.is_dir():
        raise DataError(f"{folder}: expected the folder of a {kind}, found none")
    return folder


def evaluated_datasets(
    runs: Iterable[ReportedRun],
) -> Iterator[tuple[ReportedRun, str, DatasetResult]]:
    """Run, name and result of each dataset that the runs were evaluated on."""
    for run in runs:
        if run.evaluation is not None:
            for name, dataset in run.evaluation.datasets.items():
                yield run, name, dataset
