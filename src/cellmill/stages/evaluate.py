"""Stages that evaluate the exported model on cells it was not trained on: evaluate and predict_changes.

evaluate writes metrics.json last:

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

predict_changes writes the predicted expression under held-out perturbations beside the measured one. The predictions
are the ones that task `perturbation` scores: of the same folds (the first of its repetitions), by the same methods,
fitted to none of the tested cells. A file holds changes and cells (`evaluate/tasks/perturbation.py`); packages that
compare predicted cells with measured ones make cells of them, each in its own rule (workflow/rules/bridges.smk).
"""

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from cellmill.config.evaluate import Evaluate, check_transfer
from cellmill.config.options import EvaluateOptions
from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.config.plugin import in_one_line
from cellmill.data.genes.names import match_columns
from cellmill.data.inputs.fetch import local_input
from cellmill.data.inputs.h5 import check_h5ad
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import ConfigError, DataError, UserError
from cellmill.evaluate.baselines import BaselineCache
from cellmill.evaluate.embed import gene_coverage
from cellmill.evaluate.results import read_costs, read_embedding, write_scores
from cellmill.evaluate.scores import failures, is_own
from cellmill.evaluate.task import (
    Context,
    DatasetFiles,
    EvaluatedDatasets,
    EvaluatedModel,
    Task,
    TrainedCells,
    load_evaluated,
    named_supervised,
    scored_cells,
    supervised_name,
)
from cellmill.evaluate.tasks.changes import (
    Profiles,
    find_units,
    folds_of,
    predictions,
    read_profiles,
    scored_units,
    strata_of,
    without_changes,
)
from cellmill.evaluate.tasks.perturbation import PredictedChanges, write_changes
from cellmill.evaluate.umap import umap_rows, write_umap
from cellmill.files import sha256_file, write_json


def evaluate(
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
    if not len(paths) == len(embeddings) == len(labels):
        raise ConfigError(
            f"expected as many --embeddings and --labels as --cells, got {len(cells)} cells files, "
            f"{len(embeddings)} embeddings and {len(labels)} labels"
        )
    names = [path.stem for path in paths]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--cells: two files are called {twice[0]!r}; a dataset is named by its file, rename one")
    section = options.evaluate
    check_transfer(section, names, "evaluate")
    others = [*section.external]
    if len(external) != len(names) * len(others):
        raise ConfigError(
            f"expected {len(others)} --external for each of {len(names)} --cells, for evaluate.external: "
            f"{', '.join(others) or 'none'}; got {len(external)} files"
        )
    files = {
        name: DatasetFiles(path, embedding, [] if label == "-" else label.split("|"))
        for name, path, embedding, label in zip(names, paths, embeddings, labels)
    }
    evaluated, trained, opened, about = _opened(section, model, manifest, ancestors, files)
    tasks: dict[str, Task] = {name: config.load()(config) for name, config in section.tasks.items()}
    datasets: dict[str, Any] = {}
    points: list[tuple[Any, ...]] = []
    for at, (name, given) in enumerate(files.items()):
        with opened.open(name) as dataset:
            reader, vectors, roles = dataset.reader, dataset.vectors, dataset.roles
            unseen, n_copies = trained.unseen(name, reader)
            scored, embedded = scored_cells(reader, unseen, section), np.isfinite(vectors).all(axis=1)
            cost = read_costs(given.embedding)
            print(f"{name}: {cost['coverage_frac']:.1%} of counts on known genes", flush=True)
            beside = {
                other: read_embedding(file, reader.obs.index, section.external[other].command_digest, None)
                for other, file in zip(others, external[at * len(others) :])
            }
            context = Context(
                name,
                reader,
                scored & embedded,
                vectors,
                roles,
                evaluated,
                section,
                baselines=BaselineCache(None if baselines is None else baselines / f"{name}.npz"),
                embedding_cost=cost,
                external=beside,
                datasets=opened,
            )
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
                "tasks": _run_tasks(tasks, context),
            }
            context.baselines.save()
            named = (roles.get("label"), roles.get("batch"))
            points += umap_rows(name, reader.obs.index, vectors, *named, unseen, section.seed)
    write_umap(out.parent / "umap.tsv", points)
    metrics = about | {"options": section.model_dump(mode="json"), "datasets": datasets}
    write_scores(out.parent / "scores.csv", datasets)
    kept = out.with_name("metrics.failed.json")
    kept.unlink(missing_ok=True)
    if failed := failures(section.gate, datasets):
        write_json(kept, metrics)  # beside `out`, which a failed job lacks
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise DataError(f"evaluate.gate: {failed[0]}{more}; all results are in {kept}")
    write_json(out, metrics)  # last: its existence means that the others are complete


def _opened(
    section: Evaluate, model: Path, manifest: Path, ancestors: Sequence[Path], files: dict[str, DatasetFiles]
) -> tuple[EvaluatedModel, TrainedCells, EvaluatedDatasets, dict[str, Any]]:
    """The model, its training cells, the datasets to open, and `model` and `fingerprint` of metrics.json."""
    shards = Manifest.read(manifest)
    evaluated = load_evaluated(model, manifest, shards, section.seed)
    digest = sha256_file(model / "model.safetensors")
    about = {
        "digest": digest,
        "vocabulary_digest": evaluated.vocabulary.digest,
        "step": evaluated.config.get("step"),
        "objective": evaluated.network.objective.config.name,
        "supervised_by": evaluated.supervised_by,
    }
    trained = TrainedCells([shards, *map(Manifest.read, ancestors)], files)
    opened = EvaluatedDatasets(files, digest, evaluated.network.vector_width)
    return evaluated, trained, opened, {"model": about, "fingerprint": shards.fingerprint}


def _run_tasks(tasks: dict[str, Task], context: Context) -> dict[str, Any]:
    """Entry of each task in metrics.json, those that read a label again for each further label; prints the results."""
    name, further = context.dataset, [role for role in context.roles if role.startswith("label ")]
    results: dict[str, Any] = {}
    for role in ["label", *further]:
        other, ending = context, ""
        if role in further:
            ending = f" of {context.roles[role].name}"
            other = replace(context, roles={**context.roles, "label": context.roles[role]})
        n_scored, n_cells, cells = int(context.scored.sum()), context.reader.n_obs, context.options.cells
        print(f"{name}: {n_scored:,} of {n_cells:,} cells are scored ({cells})", flush=True)
        for task_name, task in tasks.items():
            if not ending or context.options.tasks[task_name].reads_label:
                entry = results[task_name + ending] = _run_task(task, task_name + ending, other)
                for line in entry["sentences"] if entry["skipped"] is None else [f"skipped: {entry['skipped']}"]:
                    print(f"{name}: {task_name}{ending}: {line}", flush=True)
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


HELD_OUT = "perturbation"


def predict_changes(
    *,
    options: EvaluateOptions,
    model: Path,
    manifest: Path,
    cells: Path | str,
    embedding: Path,
    out: Path,
    ancestors: Sequence[Path] = (),
) -> None:
    """Write predicted changes and measured cells of one dataset to `out` (.h5ad).

    `cells` may be a URL. `ancestors` are manifests of the runs that the initial weights came from.
    """
    check_h5ad(out, "--out")
    section, path = options.evaluate, local_input(cells)
    config, name = section.tasks.get("perturbation"), path.stem
    if not isinstance(config, PerturbationConfig):
        raise ConfigError("evaluate.tasks: no task perturbation, whose predictions these are; add perturbation: {}")
    if HELD_OUT not in config.held_out:
        raise ConfigError("evaluate.tasks.perturbation.held_out: expected perturbation among them; add it")
    files = {name: DatasetFiles(path, embedding, [])}
    evaluated, trained, opened, about = _opened(section, model, manifest, ancestors, files)
    with opened.open(name) as dataset:
        unseen, _ = trained.unseen(name, dataset.reader)
        scored = scored_cells(dataset.reader, unseen, section) & np.isfinite(dataset.vectors).all(axis=1)
        context = Context(name, dataset.reader, scored, dataset.vectors, dataset.roles, evaluated, section)
        profiles, changes = predict(context, config)
        written = write_changes(out, context, profiles, changes, about["model"]["digest"])
    n = written.obs["group"].value_counts()
    print(
        f"{name}: {len(changes.names):,} held-out perturbations, {n['measured']:,} measured cells and "
        f"{n['measured control']:,} controls, {n['start control']:,} controls to start from, {written.n_vars:,} genes, "
        f"by {', '.join(changes.by_method)} -> {out}"
    )


def predict(context: Context, config: PerturbationConfig) -> tuple[Profiles, PredictedChanges]:
    """Profiles of the dataset, and the predicted changes of each perturbation that is tested.

    Raises DataError for a dataset without perturbations that can be held out.
    """
    if (reason := without_changes(context)) is not None:
        raise DataError(f"{context.dataset}: {reason}; name them in the table of datasets")
    profiles = read_profiles(context, strata_of(HELD_OUT))
    if profiles.stratum.max() < 0:
        raise DataError(f"{context.dataset}: no batch or donor has enough controls")
    units = find_units(context, profiles, HELD_OUT, config.min_cells)
    folds = [fold for fold in folds_of(context, config, units, HELD_OUT) if fold[0] == 0]
    if not folds:
        raise DataError(
            f"{context.dataset}: expected two perturbations of {config.min_cells} cells, and one that the model saw no "
            f"cell of, got {len(units)} and {int(units.unseen.sum())}; set shard.split_by: perturbation, or "
            "evaluate.cells: all"
        )
    tested = np.sort(np.concatenate([test for _, _, test in folds]))
    changes: dict[str, np.ndarray] = {}
    for _, test, predicted in predictions(context, profiles, units, folds, HELD_OUT):
        for method, values in predicted.items():
            name = supervised_name(method, context.supervised) if is_own(method) else method
            of_method = changes.setdefault(name, np.full((len(tested), values.shape[1]), np.nan))
            of_method[np.searchsorted(tested, test)] = values
    position = np.full(len(units) + 1, -1, np.int64)  # the last is for cells without a unit
    position[tested] = np.arange(len(tested))
    doses = dict(zip(units.of_cell.tolist(), profiles.dose.tolist()))  # empty where the dataset has none
    names = [" | ".join(filter(None, (str(units.perturbation[unit]), doses[unit]))) for unit in tested.tolist()]
    return profiles, PredictedChanges(names, changes, position[scored_units(context, units)], len(folds))
