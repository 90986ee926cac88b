"""Files of runs and corpora, read for the page, and the Snakemake commands that make them again.

Anything that a stage has not written yet is None or empty, and the page says so; a damaged file is an error.
"""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from cellmill.config.plugin import in_one_line
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.evaluate.umap import read_umap
from cellmill.files import read_json
from cellmill.runs.progress import read_lines
from cellmill.runs.verdict import Outcome

OF_A_RUN = (
    "plan.json",
    "train/status.json",
    "model/model.safetensors",
    "embeddings/*.h5ad",
    "predictions/*.h5ad",
    "changes/*.h5ad",
    "evaluate/metrics.json",
    "steps/*/evaluate/metrics.json",
)
OF_A_CORPUS = ("cells/*.h5ad", "vocabulary.tsv", "shards/manifest.json")


def existing_files(folder: Path, patterns: Iterable[str]) -> list[str]:
    """Files of `folder` that match, in the order of the stages, relative to it."""
    return [file.relative_to(folder).as_posix() for pattern in patterns for file in sorted(folder.glob(pattern))]


def remake_commands(kind: str, name: str, files: Iterable[str]) -> dict[str, str]:
    """Command by file, for the folder `name` of results/<kind>. A stage runs again with `--force` though its file is
    there; a finished training only if its folder is gone, so that no trained weights are lost by a command alone.
    """
    commands = {}
    for file in files:
        target = shlex.quote(f"results/{kind}/{name}/{file}")
        commands[file] = f"snakemake --profile PROFILE --force {target}"
        if file == "train/status.json":
            trained = shlex.quote(f"results/{kind}/{name}/train")
            commands[file] = f"mv {trained} {trained}.old && snakemake --profile PROFILE {target}"
    return commands


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
    kept: dict[int, dict[str, Any]] = field(default_factory=dict)  # metrics.json of kept checkpoints by step
    made: list[str] = field(default_factory=list)  # files that Snakemake makes again by name

    @property
    def supervised_by(self) -> list[str]:
        """obs columns whose labels the run was trained with."""
        written = ((self.evaluation or {}).get("model"), self.model, self.record)
        return next((of["supervised_by"] for of in written if of and "supervised_by" in of), [])


FILES = {
    "plan": "plan.json",
    "status": "train/status.json",
    "record": "train/run.json",
    "model": "model/config.json",
    "evaluation": "evaluate/metrics.json",
    "cost": "train/cost.json",
    "lines": "train/metrics.jsonl",
    "umap": "evaluate/umap.tsv",
}
"""File of each field of a run."""


@dataclass(frozen=True)
class ReportedCorpus:
    name: str
    datasets: list[dict[str, Any]]  # QC reports, by name
    manifest: dict[str, Any] | None
    n_genes: int | None  # genes of the vocabulary
    made: list[str] = field(default_factory=list)  # files that Snakemake makes again by name


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
        kept=_kept(folder),
        made=existing_files(folder, OF_A_RUN),
    )


def read_corpus(folder: Path) -> ReportedCorpus:
    """The corpus in `folder`. Raises DataError when the folder is absent."""
    _require(folder, "corpus")
    vocabulary = folder / "vocabulary.tsv"
    n_genes = Vocabulary.read(vocabulary).n_genes if vocabulary.exists() else None
    datasets = [_mapping(path) for path in sorted((folder / "cells").glob("*.json"))]
    return ReportedCorpus(
        name=folder.resolve().name,
        datasets=datasets,
        manifest=_optional(folder / "shards" / "manifest.json"),
        n_genes=n_genes,
        made=existing_files(folder, OF_A_CORPUS),
    )


def read_sweep(path: Path) -> dict[str, Any]:
    """curves.json of a sweep. Raises DataError if it is not as `sweep` writes it."""
    sweep = _mapping(path)
    if not isinstance(sweep.get("curves"), list) or not {"name", "n_runs", "axes"} <= {*sweep}:
        raise DataError(f"{path}: not as sweep writes it; make it again")
    return sweep


def damaged_file(
    runs: Iterable[tuple[Path, ReportedRun]],
    corpora: Iterable[tuple[Path, ReportedCorpus]],
    show: Callable[[list[Any], list[Any]], Any],
) -> Path | None:
    """The file of the folders that makes `show`, of runs and corpora, fail by itself; None if there is none."""
    for folder, run in runs:
        nothing = ReportedRun(run.name, None, None, None, None, None)
        for name, file in FILES.items():
            if _fails(show, [replace(nothing, **{name: getattr(run, name)})], []):
                return folder / file
    for folder, corpus in corpora:
        if _fails(show, [], [replace(corpus, manifest=None)]):
            return folder / "cells"
        if _fails(show, [], [replace(corpus, datasets=[])]):
            return folder / "shards" / "manifest.json"
    return None


def _fails(show: Callable[[list[Any], list[Any]], Any], runs: list[Any], corpora: list[Any]) -> bool:
    try:
        show(runs, corpora)
    except Exception:
        return True
    return False


def largest_memory(lines: list[dict[str, Any]], key: str) -> tuple[float, int] | None:
    """Largest `key` in lines of metrics.jsonl, GB, and its rank; None without any."""
    peaks = [(peak, rank) for line in lines for rank, peak in enumerate(line.get(key, []))]
    return max(peaks, default=None)


def sentences_of(outcome: str, evaluation: dict[str, Any] | None) -> list[str]:
    """Sentences of the comparisons with this outcome, each after its dataset's name."""
    return [
        f"{name}: {sentence}"
        for name, dataset in (evaluation or {}).get("datasets", {}).items()
        for sentence, told in outcomes_of(dataset).items()
        if told == outcome
    ]


def outcomes_of(dataset: dict[str, Any]) -> dict[str, str]:
    """Outcome of each comparison of a dataset by its sentence; the same one of two tasks, as of whole cells, is one."""
    return {
        sentence: verdict["outcome"]
        for result in dataset["tasks"].values()
        for verdict, sentence in zip(result["verdicts"], result["sentences"])
    }


def _kept(folder: Path) -> dict[int, dict[str, Any]]:
    """Evaluations of kept checkpoints by step, of the training that the run's export is of."""
    training, found = (_optional(folder / "model" / "config.json") or {}).get("fingerprint"), {}
    for path in folder.glob("steps/[1-9]*/evaluate/metrics.json"):
        metrics, model = _evaluation(path), _optional(path.parents[1] / "model" / "config.json") or {}
        if metrics is not None and model.get("fingerprint") == training:
            found[metrics["model"]["step"]] = metrics
    return dict(sorted(found.items()))


def _evaluation(path: Path) -> dict[str, Any] | None:
    metrics = _optional(path)
    try:
        earlier = any(_earlier(dataset) for dataset in (metrics or {}).get("datasets", {}).values())
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not as evaluate writes it ({in_one_line(error)}); run evaluate again") from None
    if earlier:
        raise DataError(f"{path}: written by an earlier version of cellmill; run evaluate again")
    return metrics


def _earlier(dataset: dict[str, Any]) -> bool:
    """Entry without tasks, or with verdicts in the words of an earlier version."""
    verdicts = (verdict for result in dataset.get("tasks", {}).values() for verdict in result["verdicts"])
    return "tasks" not in dataset or any(verdict["outcome"] not in get_args(Outcome) for verdict in verdicts)


def _optional(path: Path) -> dict[str, Any] | None:
    return _mapping(path) if path.exists() else None


def _mapping(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a mapping, got {type(value).__name__}; make it again")
    return value


def _require(folder: Path, kind: str) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder}: expected the folder of a {kind}, found none")
