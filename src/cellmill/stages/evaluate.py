"""Stages that evaluate the exported model: evaluate, knock_out and predict_changes.

evaluate and predict_changes test held-out cells, unless `evaluate.cells` is all. knock_out takes any
cells.

evaluate writes metrics.json last (`runs/results.py`). umap.tsv next to it has the drawn cells,
scores.csv the numbers of all rows, one a line. The seconds of a task are the only number that
varies from one evaluation to the next. Folder `finished` has the results of finished tasks
(`evaluate/finished.py`), so that only what changed is computed again.

knock_out and predict_changes write what `evaluate/inference/knock_out.py` and
`evaluate/tasks/perturbation/changes_file.py` describe.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from cellmill.config.datasets import CountsRule
from cellmill.config.evaluate import Evaluate, ExternalModel, check_transfer
from cellmill.config.load import read_model_config
from cellmill.config.options import EvaluateOptions, KnockOutOptions
from cellmill.config.parts.tasks import PerturbationConfig
from cellmill.config.published import model_folder_of
from cellmill.data.arrays import text_values
from cellmill.data.inputs.fetch import local_input
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.inputs.h5 import check_h5ad, create_h5, write_anndata
from cellmill.data.shards.manifest import Manifest
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate import draws
from cellmill.evaluate.draws import draw_cells
from cellmill.evaluate.evaluated_datasets import DatasetFiles, EvaluatedDatasets
from cellmill.evaluate.evaluated_model import load_evaluated
from cellmill.evaluate.finished import FinishedTasks
from cellmill.evaluate.gate import find_failures
from cellmill.evaluate.inference.embed import (
    describe_limits,
    load_for_inference,
    measure_gene_coverage,
)
from cellmill.evaluate.inference.files import (
    digest_embedder,
    read_costs,
    read_embedding,
    write_scores,
)
from cellmill.evaluate.inference.knock_out import knock_out_genes
from cellmill.evaluate.inference.umap import project, write_umap
from cellmill.evaluate.prediction_cache import PredictionCache
from cellmill.evaluate.run import check_packages, run_tasks, summarize
from cellmill.evaluate.seen.held_out_check import HeldOutCheck
from cellmill.evaluate.seen.seen_cells import mark_seen_cells
from cellmill.evaluate.seen.training_cells import find_training_cells
from cellmill.evaluate.task import Context, Task
from cellmill.evaluate.tasks.perturbation.changes_file import ABOUT_CHANGES, write_changes
from cellmill.evaluate.tasks.perturbation.units import PERTURBATION
from cellmill.files import check_writable, digest, name_datasets, refuse_overwriting, sha256_file
from cellmill.launch.signals import belong_to_parent, blocked, children, signal_all
from cellmill.runs import results
from cellmill.runs.results import DatasetResult, Evaluation, TaskResult

SHOWN = 5  # genes of a knock-out in the log
NO_LABELS = "-"  # in --labels
UMAP_CELLS = 20_000  # cells drawn at most; more overlap on a page


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
    """Write metrics.json to `out`, and umap.tsv and scores.csv next to it.

    `cells` are paths or URLs, `labels` the obs column of each dataset, several separated by |, '-'
    for none. `ancestors` are manifests of the runs that the initial weights came from: their
    training cells are not held out either. `baselines` is a folder for predictions of baselines,
    shared by the runs of a corpus. `external` are files of rules embed_external or zoo: those of
    the first dataset in the order of `evaluate.external`, then the next one's.
    """
    section, left_out = options.evaluate.reduce_effort()
    files = _pair_files(section, cells, embeddings, labels, external)
    for name in ("umap.tsv", "scores.csv"):
        refuse_overwriting(out, [("the file of another result", out.with_name(name))])
    refuse_overwriting(out, [("a file of --model", path) for path in model.glob("*")])
    check_writable(out)
    check_packages(section)
    if section.effort == "fast":
        omitted = [f"{', '.join(parts)} of {name}" for name, parts in left_out.items() if parts]
        print(f"effort fast leaves out the UMAP; {'; '.join(omitted)}")
    evaluation = _Evaluation(section, model, manifest, ancestors, files)
    finished = FinishedTasks(out.with_name("finished"), evaluation.datasets)
    tasks: dict[str, Task] = {name: config.load()(config) for name, config in section.tasks.items()}
    datasets: dict[str, DatasetResult] = {}
    umaps: list[Callable[[], list[tuple[Any, ...]]]] = []
    try:
        for name in files:
            with evaluation.open(name) as dataset:
                context = _add_inputs(dataset.context, files[name], baselines)
                dataset = replace(dataset, context=context)
                if section.effort == "full":
                    umaps.append(_start_umap(context, dataset.held_out))
                task_results = run_tasks(tasks, context, finished, left_out)
                datasets[name] = _make_result(dataset, task_results)
                context.prediction_cache.save()
        write_umap(out.parent / "umap.tsv", list(chain.from_iterable(rows() for rows in umaps)))
    except KeyboardInterrupt:
        signal_all(children(os.getpid()), signal.SIGTERM)  # or the end would wait for the UMAP
        raise
    except BrokenProcessPool:
        raise DataError(
            "a process of the evaluation ended; lines above may say why. If there are none, memory may have run out: "
            "raise mem_mb of evaluate in the profile's set-resources, or set its threads to 1"
        ) from None
    metrics = Evaluation(
        datasets, evaluation.about, evaluation.fingerprint, section.model_dump(mode="json")
    )
    write_scores(out.parent / "scores.csv", datasets)
    results.write(finished.metrics_path, metrics)
    failures = find_failures(section.gate, datasets)
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise DataError(
            f"evaluate.gate: {failures[0]}{more}; all results are in {finished.metrics_path}"
        )
    results.write(out, metrics)  # last: its existence means that the others are complete
    print(f"{summarize(datasets)} -> {out}")


@dataclass(frozen=True)
class _HeldOutDataset:
    """A dataset whose file is open, and its cells that the model was not trained on."""

    context: Context
    held_out: np.ndarray  # (n_obs,) bool
    n_copies: int  # copies of training cells under other names
    # True if a training or validation split of the model or an ancestor has cells of the dataset
    in_corpus: bool


def _add_inputs(context: Context, files: DatasetFiles, baselines: Path | None) -> Context:
    """Add the cost of the embedding, the embeddings of other models, and predictions of baselines
    from the folder `baselines`. Prints the share of counts on known genes.
    """
    cost = read_costs(files.embedding)
    print(f"{context.dataset}: {cost['coverage_frac']:.1%} of counts on known genes")
    vectors = {}
    for (name, command), file in zip(context.options.external.items(), files.external):
        note = describe_seen(command, context)
        vectors[f"{name}{note}"] = read_embedding(
            file, context.reader.obs_names, command.command_digest, None
        )
    cache = PredictionCache(None if baselines is None else baselines / f"{context.dataset}.npz")
    return replace(context, prediction_cache=cache, embedding_cost=cost, external=vectors)


def _make_result(dataset: _HeldOutDataset, task_results: dict[str, TaskResult]) -> DatasetResult:
    """Results of the tasks, with the numbers of cells and genes that they were computed from."""
    context = dataset.context
    which = context.options.cells
    n_cells = context.reader.n_obs
    n_scored = int(context.scored.sum())
    n_chosen = n_cells if which == "all" else int(dataset.held_out.sum())
    columns = {role: str(column.name) for role, column in context.roles.items()}
    texts = {role: text_values(column) for role, column in context.roles.items()}
    texts["name"] = np.array(context.reader.obs_names)
    return DatasetResult(
        n_cells=n_cells,
        n_scored=n_scored,
        cells=which,
        n_without_genes=n_chosen - n_scored,
        roles={role: column for role, column in columns.items() if column != role},
        tasks=task_results,
        genes=asdict(measure_gene_coverage(context.gene_columns, context.model.vocabulary)),
        in_corpus=dataset.in_corpus,
        n_copies=dataset.n_copies,
        supervised=context.supervision_note,
        scored_digest=digest({key: of[context.scored].tolist() for key, of in texts.items()}),
    )


def describe_seen(external: ExternalModel, context: Context) -> str:
    """Note after the name of another model: whether it has seen scored cells, and its labels.

    Prints how many cells it has seen.
    """
    if external.model is None:
        return external.note
    folder = Path(model_folder_of(external.model))
    path = folder / "config.json"
    labels = read_model_config(path).get("supervised_by") if path.exists() else None
    supervised = f"; supervised by {', '.join(labels)})" if labels else ")"
    seen = mark_seen_cells(context.reader, folder)
    if seen.is_seen is None or seen.caveat:
        return external.note.removesuffix(")") + supervised
    n_seen = int((seen.is_seen & context.scored).sum())
    n_scored = int(context.scored.sum())
    print(f"{context.dataset}: {folder} has seen {n_seen:,} of {n_scored:,} scored cells")
    return f" (has seen {'some' if n_seen else 'none'} of these cells{supervised}"


def _pair_files(
    section: Evaluate,
    cells: Sequence[Path | str],
    embeddings: list[Path],
    labels: list[str],
    external: Sequence[Path],
) -> dict[str, DatasetFiles]:
    """Files of each dataset by its name. Raises ConfigError for lists that do not pair up."""
    paths = [local_input(path) for path in cells]
    if not len(paths) == len(embeddings) == len(labels):
        raise ConfigError(
            f"expected as many --embeddings and --labels as --cells, got {len(cells)} cells files, "
            f"{len(embeddings)} embeddings and {len(labels)} labels"
        )
    names = name_datasets(paths, "--cells")
    check_transfer(section, names, "evaluate")
    n_models = len(section.external)
    if len(external) != len(names) * n_models:
        raise ConfigError(
            f"expected {n_models} --external for each of {len(names)} --cells, for evaluate.external: "
            f"{', '.join(section.external) or 'none'}; got {len(external)} files"
        )
    files = {}
    for number, (path, embedding, label) in enumerate(zip(paths, embeddings, labels)):
        others = external[number * n_models : (number + 1) * n_models]
        files[path.stem] = DatasetFiles(path, embedding, _split_columns(label), others)
    return files


def _split_columns(labels: str) -> list[str]:
    return [] if labels == NO_LABELS else labels.split("|")


@cache
def _umap_process() -> ProcessPoolExecutor:
    """A process for UMAP next to the tasks: it takes seconds, and 5 more if numba has not yet
    compiled it.
    """
    pool = ProcessPoolExecutor(1, get_context("spawn"), belong_to_parent)
    with blocked([signal.SIGINT]):  # before Python has started, it would print a traceback
        pool.submit(os.getpid)
    return pool


def _start_umap(context: Context, held_out: np.ndarray) -> Callable[[], list[tuple[Any, ...]]]:
    """Start the UMAP of the cells that have an embedding; the result waits for its rows of
    umap.tsv.
    """
    names = context.reader.obs_names
    vectors = context.vectors
    seed = context.options.seed
    cells = draw_cells(
        np.flatnonzero(np.isfinite(vectors).all(axis=1)), UMAP_CELLS, seed, draws.UMAP_CELLS
    )
    projected = _umap_process().submit(project, vectors[cells], seed)
    texts = {}
    for role in ("label", "batch"):
        has_role = role in context.roles
        texts[role] = text_values(context.roles[role]) if has_role else np.full(len(names), "")

    def rows() -> list[tuple[Any, ...]]:
        drawn = []
        for cell, (x, y) in zip(cells, projected.result()):
            place = (f"{x:.5g}", f"{y:.5g}", int(held_out[cell]))
            label = texts["label"][cell]
            drawn.append((context.dataset, names[cell], label, *place, texts["batch"][cell]))
        return drawn

    return rows


class _Evaluation:
    """The model, its training cells, the datasets, and what metrics.json says of the model
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
        training_manifest = Manifest.read(manifest)
        self.section = section
        self.model = load_evaluated(model, training_manifest, section.seed)
        network = self.model.network
        digest = sha256_file(model / "model.safetensors")
        self.fingerprint = training_manifest.fingerprint
        self.about: dict[str, Any] = {
            "digest": digest,
            "vocabulary_digest": self.model.vocabulary.digest,
            "step": self.model.config.get("step"),
            "objective": network.objective.config.name,
            "supervised_by": self.model.supervised_by,
        }
        training = find_training_cells(model)
        unknown = training.missing_ancestors
        parent = self.model.config.get("init_from")
        if training.missing_reason and parent is not None and not ancestors:
            unknown = [parent]
        if unknown:
            self.about["unknown_cells"] = unknown
        manifests = [training_manifest, *map(Manifest.read, ancestors)]
        self.held_out_check = HeldOutCheck(manifests, files, training.listed)
        embedder = digest_embedder(self.model.config)
        self.datasets = EvaluatedDatasets(files, digest, network.vector_width, embedder)

    @contextmanager
    def open(self, name: str) -> Iterator[_HeldOutDataset]:
        """Open a dataset. Raises DataError if no cell is held out."""
        with self.datasets.open(name) as (reader, vectors, roles):
            held_out, n_copies = self.held_out_check.find_held_out(name, reader)
            if self.section.cells == "heldout" and not held_out.any():
                raise DataError(
                    f"{reader.path}: no held-out cells: all {reader.n_obs:,} were trained or validated on; "
                    "raise shard.test_frac, or set evaluate.cells to all"
                )
            has_vector = np.isfinite(vectors).all(axis=1)
            scored = has_vector if self.section.cells == "all" else held_out & has_vector
            context = Context(
                name,
                reader,
                scored,
                vectors,
                roles,
                self.model,
                self.section,
                datasets=self.datasets,
            )
            yield _HeldOutDataset(
                context, held_out, n_copies, bool(self.held_out_check.names[name])
            )


def knock_out(
    *,
    options: KnockOutOptions,
    model: Path,
    input: Path | str,
    counts: str,
    out: Path,
    counts_rule: CountsRule = "refuse",
    gene_column: str | None = None,
) -> None:
    """Write the shifts of the cells of `input`, preprocessed or raw, without one gene each to `out`
    (.h5ad).
    """
    check_h5ad(out, "--out")
    path = local_input(input)
    section = options.knock_out
    refuse_overwriting(out, [("--input", path)])
    loaded = load_for_inference(model)
    with open_dataset(path, counts, counts_rule, gene_column) as reader:
        shifts, embedding = knock_out_genes(reader, loaded, options.embed, section)
    shifts.uns["cellmill"] = {
        "model_digest": sha256_file(model / "model.safetensors"),
        "vocabulary_digest": loaded.vocabulary.digest,
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
    for line in [*describe_limits(embedding), *shown]:
        print(f"{path.stem}: {line}")


def predict_changes(
    *,
    options: EvaluateOptions,
    model: Path,
    manifest: Path,
    cells: Path | str,
    embedding: Path,
    out: Path,
    labels: str = NO_LABELS,
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
    if PERTURBATION not in config.held_out:
        raise ConfigError(
            "evaluate.tasks.perturbation.held_out: expected perturbation among them; add it"
        )
    files = DatasetFiles(path, embedding, _split_columns(labels))
    evaluation = _Evaluation(section, model, manifest, ancestors, {name: files})
    with evaluation.open(name) as dataset:
        written = write_changes(out, dataset.context, config, evaluation.about["digest"])
    n = written.obs["group"].value_counts()
    about = written.uns[ABOUT_CHANGES]
    print(
        f"{name}: {len(about['perturbations']):,} held-out perturbations, {n['measured']:,} measured cells and "
        f"{n['measured control']:,} controls, {n['start control']:,} controls to start from, "
        f"{written.n_vars:,} genes, by {', '.join(about['methods'])} -> {out}"
    )
