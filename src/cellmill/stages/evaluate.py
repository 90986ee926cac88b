"""Stages that evaluate the exported model on cells it was not trained on: evaluate, knock_out and
predict_changes.

evaluate writes metrics.json last:

    model       digest (of model.safetensors), vocabulary_digest, step, objective, supervised_by (obs columns)
    fingerprint of the training shards
    options     as resolved
    datasets    by name, the stem of the cells file:
        n_cells, n_scored, cells (heldout or all), n_without_genes, genes (of the model, measured), in_corpus,
        n_copies (not trained on by their names, but equal to cells that were: not held out)
        roles   obs column by role, for instance label, `label 2`
        supervised  in words, for a model that was trained with labels; else null
        tasks   by name, `NAME of LABEL` for further labels: `evaluate.task.TaskResult` and `sentences`

umap.tsv beside it has the drawn cells, scores.csv the numbers of all rows, one a line. The seconds
of a task are the only number that varies from one evaluation to the next.

knock_out and predict_changes write what `evaluate/knock_out.py` and
`evaluate/tasks/perturbation.py` describe.
"""

import json
import os
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cellmill.config.datasets import CountsRule
from cellmill.config.evaluate import Evaluate, check_transfer
from cellmill.config.options import EvaluateOptions, KnockOutOptions
from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.config.plugin import in_one_line
from cellmill.data.arrays import text_values
from cellmill.data.inputs.fetch import local_input
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.inputs.h5 import check_h5ad, create_h5, write_anndata
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import ConfigError, DataError, UserError
from cellmill.evaluate.baselines import BaselineCache
from cellmill.evaluate.embed import gene_coverage, limits_of, load_for_inference
from cellmill.evaluate.knock_out import knock_out_genes
from cellmill.evaluate.results import read_costs, read_embedding, write_scores
from cellmill.evaluate.scores import draw_cells, failures
from cellmill.evaluate.task import (
    Context,
    DatasetFiles,
    EvaluatedDatasets,
    Task,
    TrainedCells,
    load_evaluated,
    run_task,
)
from cellmill.evaluate.tasks.perturbation import ABOUT_CHANGES, HELD_OUT, write_changes
from cellmill.evaluate.umap import project, write_umap
from cellmill.files import check_writable, progress, refuse_overwriting, sha256_file, write_json
from cellmill.launch.signals import (
    belong_to_parent,
    blocked,
    children,
    interrupted_later,
    signal_all,
)
from cellmill.report.tables import TaskTable, against_best

SHOWN = 5  # genes of a knock-out in the log
UMAP_CELLS = 20_000  # cells drawn at most; more overlap on a page
MOST_PROCESSES = 4  # the threads of rule evaluate: each may hold a dataset's features


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

    `cells` are paths or URLs, `labels` the obs column of each dataset, several separated by |, '-'
    for none. `ancestors` are manifests of the runs that the initial weights came from: their
    training cells are not held out either. `baselines` is a folder for predictions of baselines,
    shared by the runs of a corpus. `external` are files of rules embed_external or zoo: those of
    the first dataset in the order of `evaluate.external`, then the next one's.
    """
    paths = [local_input(given) for given in cells]
    if not len(paths) == len(embeddings) == len(labels):
        raise ConfigError(
            f"expected as many --embeddings and --labels as --cells, got {len(cells)} cells files, "
            f"{len(embeddings)} embeddings and {len(labels)} labels"
        )
    names = [path.stem for path in paths]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"--cells: two files are called {twice[0]!r}; a dataset is named by its file, rename one"
        )
    section = options.evaluate
    check_transfer(section, names, "evaluate")
    others = section.external
    if len(external) != len(names) * len(others):
        raise ConfigError(
            f"expected {len(others)} --external for each of {len(names)} --cells, for evaluate.external: "
            f"{', '.join(others) or 'none'}; got {len(external)} files"
        )
    files = {
        name: DatasetFiles(path, embedding, [] if label == "-" else label.split("|"))
        for name, path, embedding, label in zip(names, paths, embeddings, labels)
    }
    beside = [out.with_name(name) for name in ("umap.tsv", "scores.csv", "metrics.failed.json")]
    refuse_overwriting(out, [("the file of another result", path) for path in beside])
    refuse_overwriting(out, [("a file of --model", path) for path in model.glob("*")])
    check_writable(out)
    evaluation = _Evaluation(section, model, manifest, ancestors, files)
    tasks: dict[str, Task] = {name: config.load()(config) for name, config in section.tasks.items()}
    datasets: dict[str, Any] = {}
    pictures: list[Callable[[], list[tuple[Any, ...]]]] = []
    try:
        for at, (name, given) in enumerate(files.items()):
            with evaluation.open(name) as (context, unseen, n_copies):
                reader = context.reader
                cost = read_costs(given.embedding)
                print(f"{name}: {cost['coverage_frac']:.1%} of counts on known genes", flush=True)
                context = replace(
                    context,
                    baselines=BaselineCache(
                        None if baselines is None else baselines / f"{name}.npz"
                    ),
                    embedding_cost=cost,
                    external={
                        f"{other}{model.note}": read_embedding(
                            file, reader.obs.index, model.command_digest, None
                        )
                        for (other, model), file in zip(
                            others.items(), external[at * len(others) :]
                        )
                    },
                )
                pictures.append(_start_umap(context, unseen))
                n_scored = int(context.scored.sum())
                n_chosen = reader.n_obs if section.cells == "all" else unseen.sum()
                datasets[name] = {
                    "n_cells": reader.n_obs,
                    "n_scored": n_scored,
                    "cells": section.cells,
                    "n_without_genes": int(n_chosen) - n_scored,
                    "genes": asdict(gene_coverage(context.columns, context.model.vocabulary)),
                    "in_corpus": bool(evaluation.trained.seen[name]),
                    "n_copies": n_copies,
                    "roles": {
                        role: str(column.name)
                        for role, column in context.roles.items()
                        if column.name != role
                    },
                    "supervised": context.supervised,
                    "tasks": _run_tasks(tasks, context),
                }
                context.baselines.save()
        write_umap(out.parent / "umap.tsv", [row for picture in pictures for row in picture()])
    except KeyboardInterrupt:
        signal_all(children(os.getpid()), signal.SIGTERM)  # or the end would wait for the UMAP
        raise
    except BrokenProcessPool:
        raise DataError(
            "a process of the evaluation was killed, perhaps for memory; raise mem_mb of evaluate in the profile's "
            "set-resources, or set its threads to 1"
        ) from None
    metrics = evaluation.about | {"options": section.model_dump(mode="json"), "datasets": datasets}
    write_scores(out.parent / "scores.csv", datasets)
    kept = out.with_name("metrics.failed.json")
    kept.unlink(missing_ok=True)
    failed = failures(section.gate, datasets)
    if failed:
        write_json(kept, metrics)  # beside `out`, which a failed job lacks
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise DataError(f"evaluate.gate: {failed[0]}{more}; all results are in {kept}")
    write_json(out, metrics)  # last: its existence means that the others are complete
    print(f"{summary(datasets)} -> {out}", flush=True)


def summary(datasets: Mapping[str, Any]) -> str:
    """How many tasks scored the model, and why each of the others did not."""
    skipped = {
        f"{dataset}, {task}": entry["skipped"]
        for dataset, of_dataset in datasets.items()
        for task, entry in of_dataset["tasks"].items()
        if entry["skipped"] is not None
    }
    n_tasks = sum(len(of_dataset["tasks"]) for of_dataset in datasets.values())
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    if len(skipped) == n_tasks:
        return f"warning: nothing was scored, all {n_tasks} tasks were skipped ({reasons})"
    return f"{n_tasks - len(skipped)} of {n_tasks} tasks scored" + (
        f", skipped: {reasons}" if skipped else ""
    )


@cache
def _beside() -> ProcessPoolExecutor:
    """A process for UMAP beside the tasks: it takes seconds, and 5 more where numba has not yet
    compiled it.
    """
    pool = ProcessPoolExecutor(1, get_context("spawn"), belong_to_parent)
    with blocked([signal.SIGINT]):  # before Python has started, it would print a traceback
        pool.submit(os.getpid)
    return pool


def _start_umap(context: Context, unseen: np.ndarray) -> Callable[[], list[tuple[Any, ...]]]:
    """Start the UMAP of the cells that have an embedding; the result waits for its rows of
    umap.tsv.
    """
    names = context.reader.obs.index
    vectors = context.vectors
    seed = context.options.seed
    cells = draw_cells(np.flatnonzero(np.isfinite(vectors).all(axis=1)), UMAP_CELLS, seed, 1)
    projected = _beside().submit(project, vectors[cells], seed)
    labels, batches = (
        text_values(context.roles[role]) if role in context.roles else np.full(len(names), "")
        for role in ("label", "batch")
    )
    return lambda: [
        (
            context.dataset,
            names[cell],
            labels[cell],
            f"{x:.5g}",
            f"{y:.5g}",
            int(unseen[cell]),
            batches[cell],
        )
        for cell, (x, y) in zip(cells, projected.result())
    ]


class _Evaluation:
    """The model, its training cells, the datasets, and `model` and `fingerprint` of metrics.json
    (`about`).
    """

    def __init__(
        self,
        section: Evaluate,
        model: Path,
        manifest: Path,
        ancestors: Sequence[Path],
        files: dict[str, DatasetFiles],
    ) -> None:
        shards = Manifest.read(manifest)
        self.section = section
        self.model = load_evaluated(model, manifest, shards, section.seed)
        network = self.model.network
        digest = sha256_file(model / "model.safetensors")
        about = {
            "digest": digest,
            "vocabulary_digest": self.model.vocabulary.digest,
            "step": self.model.config.get("step"),
            "objective": network.objective.config.name,
            "supervised_by": self.model.supervised_by,
        }
        self.about: dict[str, Any] = {"model": about, "fingerprint": shards.fingerprint}
        self.trained = TrainedCells([shards, *map(Manifest.read, ancestors)], files)
        self.datasets = EvaluatedDatasets(files, digest, network.vector_width)

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[Context, np.ndarray, int]]:
        """One dataset, and the result of `TrainedCells.unseen`. Raises DataError if no cell is held
        out.
        """
        with self.datasets.open(name) as (reader, vectors, roles):
            unseen, n_copies = self.trained.unseen(name, reader)
            if self.section.cells == "heldout" and not unseen.any():
                raise DataError(
                    f"{reader.path}: no held-out cells: all {reader.n_obs:,} were trained or validated on; "
                    "raise shard.test_frac, or set evaluate.cells to all"
                )
            scored = (unseen | (self.section.cells == "all")) & np.isfinite(vectors).all(axis=1)
            yield (
                Context(
                    name,
                    reader,
                    scored,
                    vectors,
                    roles,
                    self.model,
                    self.section,
                    datasets=self.datasets,
                ),
                unseen,
                n_copies,
            )


@dataclass(frozen=True)
class _Work:
    """A task on a dataset, with one of its labels."""

    name: str
    task: Task
    context: Context

    def run(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Entry of metrics.json, and what was added to the predictions of baselines."""
        started = time.perf_counter()
        known = self.context.baselines.known.copy()
        entry = run_task(self.task, self.context).to_json()
        entry["figures"] = entry["figures"] | {"seconds": round(time.perf_counter() - started, 2)}
        json.dumps(entry, allow_nan=False)
        return entry, {
            key: found for key, found in self.context.baselines.known.items() if key not in known
        }


def _works(tasks: dict[str, Task], context: Context) -> Iterator[_Work]:
    """Each task, and those that read a label again for each further label."""
    for role in ["label", *(role for role in context.roles if role.startswith("label "))]:
        again = role != "label"
        ending = f" of {context.roles[role].name}" if again else ""
        other = (
            replace(context, roles={**context.roles, "label": context.roles[role]})
            if again
            else context
        )
        for name, task in tasks.items():
            if not again or context.options.tasks[name].reads_label:
                yield _Work(name + ending, task, other)


_inherited: list[_Work] = []  # of the dataset at work, for processes that are forked from this one


def _run_inherited(at: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return _inherited[at].run()


def _on_one_thread() -> None:
    """Initialize a forked process: its libraries' threads are not there, and results depend on no
    number of them.
    """
    belong_to_parent()
    torch.set_num_threads(1)


@contextmanager
def _processes(n: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that are forked at the first call, and ended where an error ends the evaluation."""
    others = active_children()
    with ProcessPoolExecutor(n, get_context("fork"), _on_one_thread) as pool:
        try:
            yield pool
        except BaseException:
            for process in active_children():
                if process not in others:
                    process.terminate()
            raise


def _run_tasks(tasks: dict[str, Task], context: Context) -> dict[str, Any]:
    """Entry of each task in metrics.json; prints the results. On CPU cores several processes run
    the tasks.

    A task that fails is named in the last line, below its traceback.
    """
    works = [*_works(tasks, context)]
    results = {}
    futures: dict[Future[Any], _Work] = {}  # in the order in which the processes begin them
    dataset = context.dataset
    n_scored = int(context.scored.sum())
    n_cells = context.reader.n_obs
    print(
        f"{dataset}: {n_scored:,} of {n_cells:,} cells are scored ({context.options.cells})",
        flush=True,
    )
    apart = [at for at, work in enumerate(works) if not getattr(work.task, "keeps_result", False)]
    on_gpu = next(context.model.network.parameters()).is_cuda
    n = 1 if on_gpu else min(torch.get_num_threads(), len(apart), MOST_PROCESSES)
    with ExitStack() as stack:
        if n > 1:
            _inherited[:] = works
            stack.callback(_inherited.clear)
            pool = stack.enter_context(_processes(n))
            with warnings.catch_warnings(), interrupted_later():
                # of Python 3.12: of threads, see _on_one_thread
                warnings.simplefilter("ignore", DeprecationWarning)
                futures = {pool.submit(_run_inherited, at): works[at] for at in apart}
        here = [work for at, work in enumerate(works) if not futures or at not in apart]

        def at_work() -> str:
            own = [work.name for work in here if work.name not in results][:1]
            return ", ".join(
                own + [work.name for future, work in futures.items() if not future.done()][:n]
            )

        finished = ((futures[one], one.result) for one in as_completed(futures))
        entries = chain(((work, work.run) for work in here), finished)
        for work, entry_of in progress(
            entries, f"evaluate {dataset}", len(works), "tasks", now=at_work
        ):
            try:
                entry, added = entry_of()
            except (UserError, BrokenProcessPool):
                raise
            except Exception as error:
                traceback.print_exc()
                raise DataError(
                    f"{dataset}: task {work.name!r} failed ({in_one_line(error)}); repair it, or take it out of "
                    "evaluate.tasks"
                ) from None
            context.baselines.known.update(added)
            results[work.name] = entry
            for line in result_lines(entry):
                print(f"{dataset}: {work.name}: {line}", flush=True)
    return {work.name: results[work.name] for work in works}


def result_lines(entry: dict[str, Any]) -> list[str]:
    """The result of a task in one line, and its notes. metrics.json and the report have every
    comparison.
    """
    if entry["skipped"] is not None:
        return [f"skipped: {entry['skipped']}"]
    table = TaskTable(entry)
    parts = []
    best = table.best_of("model")
    if best is not None:
        parts.append(f"{table.metric} {best.value:.3f}, {best.name}")
    baseline = table.best_of("baseline")
    if baseline is not None:
        parts.append(f"best baseline {baseline.value:.3f}, {baseline.name}")
    outcomes = Counter(verdict["outcome"] for verdict in against_best(entry))
    if outcomes:
        counts = ", ".join(f"{outcome} in {n}" for outcome, n in sorted(outcomes.items()))
        parts.append(f"against the best baseline of each metric {counts}")
    n_computed = len(entry["verdicts"]) + len(entry["gaps"])  # sentences of these come first
    notes = entry["sentences"][n_computed:]
    if not parts:
        parts = [text.removesuffix(".") for text in entry["sentences"][: len(entry["verdicts"])]]
    return (
        ["; ".join(parts), *notes] if parts else notes or ["done, its numbers are in metrics.json"]
    )


def knock_out(
    *,
    options: KnockOutOptions,
    model: Path,
    input: Path | str,
    counts: str,
    out: Path,
    counts_rule: CountsRule = "refuse",
) -> None:
    """Write the shifts of the cells of `input`, preprocessed or raw, without one gene each to `out`
    (.h5ad).
    """
    check_h5ad(out, "--out")
    path = local_input(input)
    section = options.knock_out
    refuse_overwriting(out, [("--input", path)])
    network, vocabulary, tokens, _ = load_for_inference(model)
    with open_dataset(path, counts) as reader:
        reader.counts_rule = counts_rule
        shifts, embedding = knock_out_genes(
            reader, network, vocabulary, tokens, options.embed, section
        )
    shifts.uns["cellmill"] = {
        "model_digest": sha256_file(model / "model.safetensors"),
        "vocabulary_digest": vocabulary.digest,
        **section.model_dump(exclude={"genes"}),
    }
    with create_h5(out) as file:
        write_anndata(file, shifts)
    print(
        f"{path.stem}: {shifts.n_vars:,} genes removed one by one from {shifts.n_obs:,} cells -> {out}"
    )
    shown = [
        f"{gene.symbol} moves {gene.n_cells:,} cells by {gene.shift:.2g}, genes of similar expression by "
        f"{gene.null_mean:.2g} (z {gene.z:.1f}, p {gene.p:.2g})"
        for gene in shifts.var.head(SHOWN).itertuples()
    ]
    for line in [*limits_of(embedding), *shown]:
        print(f"{path.stem}: {line}")


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
    """Write predicted changes and measured cells of one dataset to `out` (.h5ad); arguments as in
    `evaluate`.
    """
    check_h5ad(out, "--out")
    section = options.evaluate
    path = local_input(cells)
    config = section.tasks.get("perturbation")
    name = path.stem
    if not isinstance(config, PerturbationConfig):
        raise ConfigError(
            "evaluate.tasks: no task perturbation, whose predictions these are; add perturbation: {}"
        )
    if HELD_OUT not in config.held_out:
        raise ConfigError(
            "evaluate.tasks.perturbation.held_out: expected perturbation among them; add it"
        )
    evaluation = _Evaluation(
        section, model, manifest, ancestors, {name: DatasetFiles(path, embedding, [])}
    )
    with evaluation.open(name) as (context, _, _):
        written = write_changes(out, context, config, evaluation.about["model"]["digest"])
    n = written.obs["group"].value_counts()
    about = written.uns[ABOUT_CHANGES]
    print(
        f"{name}: {len(about['perturbations']):,} held-out perturbations, {n['measured']:,} measured cells and "
        f"{n['measured control']:,} controls, {n['start control']:,} controls to start from, {written.n_vars:,} genes, "
        f"by {', '.join(about['methods'])} -> {out}"
    )
