"""evaluate: tasks that evaluate the exported model on cells it was not trained on.

metrics.json, written last:

    model       digest (of model.safetensors), vocabulary_digest, step, objective, supervised_by (obs columns)
    fingerprint of the training shards
    options     as resolved
    datasets    by name, the stem of the cells file:
        n_cells, n_scored, cells (heldout or all), n_without_genes, genes (of the model, measured), in_corpus,
        n_copies (not trained on by their names, but equal to cells that were: not held out)
        roles   obs column by role, for instance label, `label 2`
        supervised  in words, for a model that was trained with labels; else null
        tasks   by name, `NAME of LABEL` for further labels: rows, metric, verdicts, sentences, figures,
                skipped, differences (evaluate.task.TaskResult)

umap.tsv beside it has dataset, obs_name, label, x, y and heldout (1 or 0) of each drawn cell; scores.csv the numbers of
all rows, one a line. Figures of a task have its seconds, the only number that varies from one evaluation to the next.
"""

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from cellmill.config.evaluate import Evaluate
from cellmill.config.options import EvaluateOptions
from cellmill.config.transfer_task import check_transfer
from cellmill.data.dataset_file import local_input
from cellmill.data.genes import match_columns
from cellmill.data.manifest import Manifest
from cellmill.errors import ConfigError, DataError, UserError
from cellmill.evaluate.baseline_cache import BaselineCache
from cellmill.evaluate.embedding_file import read_cost, read_coverage, read_embedding
from cellmill.evaluate.evaluated_datasets import DatasetFiles, EvaluatedDatasets
from cellmill.evaluate.gate import failures
from cellmill.evaluate.gene_coverage import gene_coverage
from cellmill.evaluate.projection import umap_rows
from cellmill.evaluate.scored_cells import TrainedCells, load_evaluated, scored_cells
from cellmill.evaluate.task import Context, Task, named_supervised
from cellmill.evaluate.tidy_scores import write_scores
from cellmill.evaluate.umap_table import write_umap
from cellmill.files import sha256_file, write_json
from cellmill.registry import in_one_line


def run(
    *,
    options: EvaluateOptions,
    model: Path,
    manifest: Path,
    cells: Sequence[Path | str],
    embeddings: list[Path],
    labels: list[str],
    out: Path,
    ancestors: Sequence[Path] = (),
    baselines: Path | None = None,
    external: Sequence[Path] = (),
) -> None:
    """Write metrics.json to `out` and umap.tsv beside it.

    `cells` are paths or URLs, `labels` the obs column of each dataset, several separated by |, '-' for none.
    `ancestors` are manifests of the runs that the initial weights came from: their training cells are not held out
    either. `baselines` is a folder for predictions of baselines, shared by the runs of a corpus. `external` are files
    of stage embed_external: those of the first dataset, in the order of `evaluate.external`, then of the next one.
    """
    paths = [local_input(given) for given in cells]
    names = _dataset_names(paths, embeddings, labels)
    section = options.evaluate
    check_transfer(section, names, "evaluate")
    others = _external_of(section, names, external)
    shards = Manifest.read(manifest)
    evaluated = load_evaluated(model, manifest, shards, section.seed)
    digest = sha256_file(model / "model.safetensors")
    files = {
        name: DatasetFiles(path, embedding, [] if label == "-" else label.split("|"))
        for name, path, embedding, label in zip(names, paths, embeddings, labels)
    }
    opened = EvaluatedDatasets(files, digest, evaluated.network.vector_width)
    tasks: dict[str, Task] = {name: config.load()(config) for name, config in section.tasks.items()}
    trained = TrainedCells([shards, *map(Manifest.read, ancestors)], names)
    datasets: dict[str, Any] = {}
    points: list[tuple[Any, ...]] = []
    for name, of_name in files.items():
        with opened.open(name) as dataset:
            reader, vectors, roles = dataset.reader, dataset.vectors, dataset.roles
            unseen, n_copies = trained.unseen(name, reader)
            scored = scored_cells(reader, unseen, section)
            embedded = np.isfinite(vectors).all(axis=1)
            cache = BaselineCache(None if baselines is None else baselines / f"{name}.npz")
            cost = read_cost(of_name.embedding)
            if (frac := read_coverage(of_name.embedding)) is not None:
                print(f"{name}: {frac:.1%} of counts on known genes", flush=True)
            beside = {
                model: read_embedding(file, reader.obs.index, section.external[model].command_digest, None)
                for model, file in others[name].items()
            }
            given = (vectors, roles, evaluated, section, cache, cost, beside, opened)
            context = Context(name, reader, scored & embedded, *given)
            datasets[name] = {
                "n_cells": reader.n_obs,
                "n_scored": int(context.scored.sum()),
                "cells": section.cells,
                "n_without_genes": int((scored & ~embedded).sum()),
                "genes": asdict(gene_coverage(match_columns(reader, evaluated.vocabulary), evaluated.vocabulary)),
                "in_corpus": trained.in_corpus(name),
                "n_copies": n_copies,
                "roles": {role: str(column.name) for role, column in roles.items() if column.name != role},
                "supervised": context.supervised,
                "tasks": _run_tasks(tasks, context) | _run_on_other_labels(tasks, context, of_name.labels[1:]),
            }
            cache.save()
            named = (roles.get("label"), roles.get("batch"))
            points += umap_rows(name, reader.obs.index, vectors, *named, unseen, section.seed)
    write_umap(out.parent / "umap.tsv", points)
    about = {"digest": digest, "vocabulary_digest": evaluated.vocabulary.digest, "step": evaluated.config.get("step")}
    about["objective"] = evaluated.network.objective.config.name
    about["supervised_by"] = evaluated.supervised_by
    resolved = section.model_dump(mode="json")
    metrics = {"model": about, "fingerprint": shards.fingerprint, "options": resolved, "datasets": datasets}
    write_scores(out.parent / "scores.csv", datasets)
    _check_gates(section, datasets, metrics, out)
    write_json(out, metrics)  # last: its existence means that the others are complete


def _run_tasks(tasks: dict[str, Task], context: Context) -> dict[str, Any]:
    """Entry of each task in metrics.json; prints what each found."""
    name = context.dataset
    n_scored, n_cells, cells = int(context.scored.sum()), context.reader.n_obs, context.options.cells
    print(f"{name}: {n_scored:,} of {n_cells:,} cells are scored ({cells})", flush=True)
    results: dict[str, Any] = {}
    for task_name, task in tasks.items():
        entry = results[task_name] = _run_task(task, task_name, context)
        for line in entry["sentences"] if entry["skipped"] is None else [f"skipped: {entry['skipped']}"]:
            print(f"{name}: {task_name}: {line}", flush=True)
    return results


def _check_gates(options: Evaluate, datasets: dict[str, Any], metrics: dict[str, Any], out: Path) -> None:
    """Raise DataError with the first failed gate; the metrics are then kept beside `out`, which a failed job lacks."""
    kept = out.with_name("metrics.failed.json")
    kept.unlink(missing_ok=True)
    if failed := failures(options.gate, datasets):
        write_json(kept, metrics)
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise DataError(f"evaluate.gate: {failed[0]}{more}; all results are in {kept}")


def _run_on_other_labels(tasks: dict[str, Task], context: Context, labels: list[str]) -> dict[str, Any]:
    """Entries of the tasks that read a label, for each label after the first."""
    results: dict[str, Any] = {}
    for number, label in enumerate(labels, start=2):
        other = replace(context, roles={**context.roles, "label": context.roles[f"label {number}"]})
        reading = {
            f"{name} of {label}": task for name, task in tasks.items() if context.options.tasks[name].reads_label
        }
        results |= _run_tasks(reading, other)
    return results


def _run_task(task: Task, name: str, context: Context) -> dict[str, Any]:
    """Entry of one task, with its seconds. A task that fails is named in the last line, below its traceback."""
    started = time.perf_counter()
    try:
        entry = named_supervised(task.run(context), context.supervised).to_json()
        entry["figures"] = entry["figures"] | {"seconds": round(time.perf_counter() - started, 2)}
        json.dumps(entry, allow_nan=False)
    except UserError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise DataError(
            f"{context.dataset}: task {name!r} failed ({in_one_line(error)}); repair it, or take it out of "
            "evaluate.tasks"
        ) from None
    return entry


def _dataset_names(cells: list[Path], embeddings: list[Path], labels: list[str]) -> list[str]:
    if not len(cells) == len(embeddings) == len(labels):
        raise ConfigError(
            f"expected as many --embeddings and --labels as --cells, got {len(cells)} cells files, "
            f"{len(embeddings)} embeddings and {len(labels)} labels"
        )
    names = [path.stem for path in cells]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--cells: two files are called {twice[0]!r}; a dataset is named by its file, rename one")
    return names


def _external_of(options: Evaluate, names: list[str], files: Sequence[Path]) -> dict[str, dict[str, Path]]:
    """File of each external model by dataset and name."""
    models = [*options.external]
    if len(files) != len(names) * len(models):
        raise ConfigError(
            f"expected {len(models)} --external for each of {len(names)} --cells, for evaluate.external: "
            f"{', '.join(models) or 'none'}; got {len(files)} files"
        )
    return {name: dict(zip(models, files[at * len(models) :])) for at, name in enumerate(names)}
