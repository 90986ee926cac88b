"""Files of runs and corpora, read for the page.

What a stage has not written yet is None or empty, and the page says so; a damaged file is an error.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.evaluate.umap_table import read_umap
from cellmill.files import read_json
from cellmill.runs.metrics import read_lines
from cellmill.runs.verdict import Outcome


@dataclass(frozen=True)
class ReportedRun:
    name: str
    plan: dict[str, Any] | None
    status: dict[str, Any] | None
    record: dict[str, Any] | None  # train/run.json: resolved options, digests, environment
    model: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    cost: dict[str, Any] | None = None  # train/cost.json; None before a training has ended
    lines: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl, without an incomplete last line
    umap: dict[str, list[dict[str, str]]] = field(default_factory=dict)  # rows of umap.tsv by dataset

    @property
    def supervised_by(self) -> list[str]:
        """obs columns whose labels the run was trained with."""
        written = ((self.evaluation or {}).get("model"), self.model, self.record)
        return next((of["supervised_by"] for of in written if of and "supervised_by" in of), [])


@dataclass(frozen=True)
class ReportedCorpus:
    name: str
    datasets: list[dict[str, Any]]  # QC reports, by name
    manifest: dict[str, Any] | None
    n_genes: int | None  # genes of the vocabulary


def read_run(folder: Path) -> ReportedRun:
    """The run in `folder`. Raises DataError when the folder is absent."""
    _require(folder, "run")
    train = folder / "train"
    umap: dict[str, list[dict[str, str]]] = {}
    for row in read_umap(folder / "evaluate" / "umap.tsv"):
        umap.setdefault(row["dataset"], []).append(row)
    return ReportedRun(
        name=folder.resolve().name,
        plan=_optional(folder / "plan.json"),
        status=_optional(train / "status.json") or _optional(train / "state.json"),
        record=_optional(train / "run.json"),
        model=_optional(folder / "model" / "config.json"),
        cost=_optional(train / "cost.json"),
        evaluation=_evaluation(folder / "evaluate" / "metrics.json"),
        lines=read_lines(train / "metrics.jsonl"),
        umap=umap,
    )


def read_corpus(folder: Path) -> ReportedCorpus:
    """The corpus in `folder`. Raises DataError when the folder is absent."""
    _require(folder, "corpus")
    vocabulary = folder / "vocabulary.tsv"
    n_genes = Vocabulary.read(vocabulary).n_genes if vocabulary.exists() else None
    datasets = [read_json(path) for path in sorted((folder / "cells").glob("*.json"))]
    return ReportedCorpus(folder.resolve().name, datasets, _optional(folder / "shards" / "manifest.json"), n_genes)


def largest_memory(lines: list[dict[str, Any]]) -> tuple[float, int] | None:
    """Largest peak memory in lines of metrics.jsonl, GB, and its rank; None without any."""
    peaks = [
        (peak, rank)
        for line in lines
        for name in ("peak_allocated_gb", "peak_resident_gb")
        for rank, peak in enumerate(line.get(name, []))
    ]
    return max(peaks, default=None)


def losses(evaluation: dict[str, Any] | None) -> list[str]:
    """Sentences of the comparisons in which the model is not ahead, each after its dataset's name."""
    return [
        f"{name}: {sentence}"
        for name, dataset in (evaluation or {}).get("datasets", {}).items()
        for result in dataset["tasks"].values()
        for verdict, sentence in zip(result["verdicts"], result["sentences"])
        if verdict["outcome"] != "ahead"
    ]


def _evaluation(path: Path) -> dict[str, Any] | None:
    metrics = _optional(path)
    if any(_earlier(dataset) for dataset in (metrics or {}).get("datasets", {}).values()):
        raise DataError(f"{path}: written by an earlier version of cellmill; run evaluate again")
    return metrics


def _earlier(dataset: dict[str, Any]) -> bool:
    """Entry without tasks, or with verdicts in the words of an earlier version."""
    verdicts = (verdict for result in dataset.get("tasks", {}).values() for verdict in result["verdicts"])
    return "tasks" not in dataset or any(verdict["outcome"] not in get_args(Outcome) for verdict in verdicts)


def _optional(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None


def _require(folder: Path, kind: str) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder}: expected the folder of a {kind}, found none")
