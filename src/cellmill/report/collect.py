"""What the folders of runs and corpora hold, for the report: read, never computed anew.

What a stage has not written yet is None or empty, and the page says so; a file that is there and damaged is an error.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cellmill.errors import DataError
from cellmill.evaluate.projection import UMAP_COLUMNS
from cellmill.files import read_json
from cellmill.runs.metrics import read_lines


@dataclass(frozen=True)
class ReportedRun:
    """One run's figures; each is what the stage wrote."""

    name: str
    plan: dict[str, Any] | None
    status: dict[str, Any] | None
    record: dict[str, Any] | None
    """train/run.json: resolved options, digests, environment."""
    model: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    lines: list[dict[str, Any]] = field(default_factory=list)
    """metrics.jsonl, without a torn last line."""
    umap: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """Rows of umap.tsv by dataset."""


@dataclass(frozen=True)
class ReportedCorpus:
    """One corpus's figures."""

    name: str
    datasets: list[dict[str, Any]]
    """QC reports, by name."""
    manifest: dict[str, Any] | None
    n_genes: int | None
    """Genes of the vocabulary."""


def read_run(folder: Path) -> ReportedRun:
    """The run in `folder`. Raises DataError when the folder is absent."""
    _require(folder, "run")
    train = folder / "train"
    status = next((path for path in (train / "status.json", train / "state.json") if path.exists()), None)
    umap: dict[str, list[dict[str, str]]] = {}
    for row in read_umap(folder / "evaluate" / "umap.tsv"):
        umap.setdefault(row["dataset"], []).append(row)
    return ReportedRun(
        name=folder.resolve().name,
        plan=_optional(folder / "plan.json"),
        status=read_json(status) if status else None,
        record=_optional(train / "run.json"),
        model=_optional(folder / "model" / "config.json"),
        evaluation=_optional(folder / "evaluate" / "metrics.json"),
        lines=[line for line in read_lines(train / "metrics.jsonl") if isinstance(line, dict) and "step" in line],
        umap=umap,
    )


def read_corpus(folder: Path) -> ReportedCorpus:
    """The corpus in `folder`. Raises DataError when the folder is absent."""
    _require(folder, "corpus")
    vocabulary = folder / "vocabulary.tsv"
    n_genes = None
    if vocabulary.exists():
        with open(vocabulary, encoding="utf-8") as file:
            n_genes = sum(1 for line in file if line.split("\t")[0].isdigit() and "\t<" not in line[:12])
    return ReportedCorpus(
        name=folder.resolve().name,
        datasets=[read_json(path) for path in sorted((folder / "cells").glob("*.json"))],
        manifest=_optional(folder / "shards" / "manifest.json"),
        n_genes=n_genes,
    )


def read_umap(path: Path) -> list[dict[str, str]]:
    """Rows of a umap.tsv as text; none when there is no file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, delimiter="\t")
        if tuple(reader.fieldnames or ()) != UMAP_COLUMNS:
            raise DataError(f"{path}: the columns should be {', '.join(UMAP_COLUMNS)}; evaluate the run again")
        return list(reader)


def largest_memory(lines: list[dict[str, Any]]) -> tuple[float, int] | None:
    """Largest peak of any rank in lines of metrics.jsonl, GB, and the rank; None where there is none."""
    peaks = [
        (peak, rank)
        for line in lines
        for name in ("peak_allocated_gb", "peak_resident_gb")
        for rank, peak in enumerate(line.get(name, []))
    ]
    return max(peaks, default=None)


def losses(evaluation: dict[str, Any] | None) -> list[str]:
    """Sentences of the comparisons that the model did not win, each after its dataset's name."""
    sentences = []
    for name, dataset in (evaluation or {}).get("datasets", {}).items():
        for part in (dataset.get("probe") or {}, dataset.get("reconstruction") or {}):
            pairs = zip(part.get("verdicts", []), part.get("verdict", []))
            sentences += [f"{name}: {text}" for verdict, text in pairs if verdict["outcome"] != "won"]
    return sentences


def _optional(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None


def _require(folder: Path, kind: str) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it should be the folder of a {kind}")
