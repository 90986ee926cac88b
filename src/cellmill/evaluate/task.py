"""Contract of an evaluation task, and everything a task is given: the model, the datasets, and the
held-out cells.

The `implementation` of a task's options (`config.parts.tasks.TaskConfig`) names its class. Stage
`evaluate` calls `run` once per dataset and writes the returned result to metrics.json; the report
shows any task.

Held-out cells are in no training or validation shard of the model's corpus or of its ancestors'
corpora. A cell is found there by dataset and obs name, and also, under any name, by its counts of
the vocabulary's genes. Different cells with few counts may be equal by chance; these do not count
as held out either.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import scipy.sparse as sp
from scipy.linalg import svd
from scipy.sparse.linalg import LinearOperator, eigsh
from sklearn.base import BaseEstimator
from sklearn.utils.extmath import svd_flip
from sklearn.utils.sparsefuncs import mean_variance_axis
from threadpoolctl import threadpool_limits

from cellmill.config.corpus import IS_CONTROL, ROLES
from cellmill.config.evaluate import Evaluate
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.arrays import log_normalise, rank_buckets, summed
from cellmill.data.genes.names import GeneColumns, match_columns
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.shards.manifest import READ, REMEDY, Manifest, record, verify_changed
from cellmill.data.shards.reader import open_shards, read_names
from cellmill.data.stream.tokenizers import CellTokenizer
from cellmill.errors import DataError
from cellmill.evaluate.baselines import BaselineCache
from cellmill.evaluate.embed import load_for_inference
from cellmill.evaluate.results import read_embedding
from cellmill.evaluate.scores import ScoreColumn, against_best, differences, table_rows
from cellmill.evaluate.seen import find_equal_cells, read_hashes
from cellmill.models.build import build
from cellmill.models.export import initial_tensors, spec_of
from cellmill.models.family import Model
from cellmill.models.objective import GeneStatistics
from cellmill.parallel.materialize import materialize, to_empty
from cellmill.runs.verdict import Gap, Verdict, gap_words, sentence

# training cells read at most; shards are preshuffled, so the first ones are a random sample
MAX_TRAIN_CELLS = 200_000
_ROWS = 4096  # cells per read
PCA_CELLS = 10_000
COMPONENTS = 50
# of a component, relative to the first: of rounding errors below 1e-4, of the 50th usually above
# 1e-2
NO_SPREAD = 3e-4
TOKEN_BUDGET = 16_384  # tokens in one forward pass of a task; results do not depend on it


@dataclass(frozen=True)
class DatasetFiles:
    cells: Path
    embedding: Path
    labels: list[str]  # obs columns


@dataclass(frozen=True)
class EvaluatedDatasets:
    """Datasets by name. Embeddings must come from the model with weights `digest` and be `width`
    wide.
    """

    files: Mapping[str, DatasetFiles]
    digest: str
    width: int

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[CountsReader, np.ndarray, dict[str, pd.Series]]]:
        """`reader`, `vectors` and `roles` (see `Context`) of one of `files`. Raises DataError for a
        damaged file.

        Roles are the labels, and those that preprocessed cells have under their own names.
        """
        files = self.files[name]
        columns = {
            "label" if number == 1 else f"label {number}": of
            for number, of in enumerate(files.labels, start=1)
        }
        with open_dataset(files.cells) as reader:
            vectors = read_embedding(files.embedding, reader.obs.index, self.digest, self.width)
            columns |= {role: role for role in (*ROLES, IS_CONTROL) if role in reader.obs}
            roles = {
                role: reader.obs_column(of, f"the dataset's {role}") for role, of in columns.items()
            }
            yield reader, vectors, roles


def read_gene_statistics(manifest: Manifest, tokens: Tokens) -> GeneStatistics:
    """Statistics over the first MAX_TRAIN_CELLS cells of the training shards."""
    n_genes = manifest.n_genes
    n_cells = 0
    total = np.zeros(n_genes)
    by_rank = np.zeros((tokens.max_tokens.bit_length(), n_genes), np.int64)
    tokenizer = CellTokenizer(tokens, n_genes, variability=manifest.variability)
    for genes, counts, starts in _blocks(manifest, MAX_TRAIN_CELLS):
        made = tokenizer.batch(genes, counts, starts, np.arange(len(starts) - 1))
        rows = made.genes - len(SPECIAL)
        buckets = rank_buckets(
            np.arange(len(rows)) - np.repeat(made.cu_seqlens[:-1], np.diff(made.cu_seqlens))
        )
        by_rank += np.bincount(buckets * n_genes + rows, minlength=by_rank.size).reshape(
            by_rank.shape
        )
        total += np.bincount(rows, weights=made.values, minlength=n_genes)
        n_cells += len(starts) - 1
    n = by_rank.sum(0)
    overall = float(total.sum() / max(n.sum(), 1))
    return GeneStatistics(
        n, np.where(n > 0, total / np.maximum(n, 1), overall), overall, n_cells, by_rank
    )


def read_training_counts(manifest: Manifest, max_cells: int) -> sp.csr_matrix:
    """Counts of the first training cells, at least `max_cells` if there are so many: `(cells,
    genes)`, uint32.
    """
    blocks = [
        sp.csr_matrix(
            (counts.astype(np.uint32), genes, starts), shape=(len(starts) - 1, manifest.n_genes)
        )
        for genes, counts, starts in _blocks(manifest, max_cells)
    ]
    return sp.vstack(blocks, format="csr")


def _blocks(
    manifest: Manifest, max_cells: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Genes, counts and starts (as in `Tokenizer.tokenize`) of blocks of training cells, until
    `max_cells`.
    """
    n_cells = 0
    for shard in open_shards(manifest, "train"):
        for first in range(0, shard.n_obs, _ROWS):
            if n_cells >= max_cells:
                return
            starts = shard.indptr[first : first + _ROWS + 1].astype(np.int64)
            span = int(starts[0]), int(starts[-1])
            genes = shard.read_genes(*span)
            counts = shard.read_counts(*span)
            # scipy would crash on these
            if len(genes) and not 0 <= genes.min() <= genes.max() < manifest.n_genes:
                raise DataError(
                    f"{shard.path}: damaged: X/indices are not genes of the vocabulary; {REMEDY}"
                )
            n_cells += len(starts) - 1
            yield genes, counts, starts - starts[0]
        shard.close()


class TrainedCells:
    """Training and validation cells of the model's and its ancestors' corpora. Raises DataError for
    a changed shard.
    """

    def __init__(self, manifests: Sequence[Manifest], datasets: Iterable[str]) -> None:
        self.seen: dict[str, set[str]] = {name: set() for name in datasets}  # obs names
        for manifest in manifests:
            if verify_changed(manifest):
                record(manifest)
            for path in (
                manifest.shard_path(shard)
                for split in READ
                for shard in manifest.splits[split].shards
            ):
                for dataset, _, cell in (name.partition(":") for name in read_names(path, "obs")):
                    if dataset in self.seen:
                        self.seen[dataset].add(cell)
        by_fingerprint = {manifest.fingerprint: manifest for manifest in manifests}
        self._corpora = [read_hashes(manifest) for manifest in by_fingerprint.values()]

    def unseen(self, dataset: str, reader: CountsReader) -> tuple[np.ndarray, int]:
        """Mask, bool `(n_obs,)`, of the cells that were not trained on, and the number of copies,
        which is printed.
        """
        unnamed = ~reader.obs.index.isin([*self.seen[dataset]])
        copies = self.copies(reader, unnamed)
        n = int(copies.sum())
        if n:
            line = f"{n:,} cells are equal to training or validation cells of other names: not held out"
            print(f"{dataset}: {line}", flush=True)
        return unnamed & ~copies, n

    def copies(self, reader: CountsReader, among: np.ndarray) -> np.ndarray:
        """Mask, bool `(n_obs,)`, of the cells of mask `among` with the counts of a trained cell of
        any name.
        """
        return find_equal_cells(reader, self._corpora, among)


class PrincipalComponents(BaseEstimator):
    """Components of sparse cells, the same as of scikit-learn's PCA with ARPACK, but no more than
    the cells span.

    Beyond these ARPACK draws vectors, for scikit-learn from the system's randomness: others in each
    evaluation.
    """

    components_: np.ndarray  # (components, features)
    explained_variance_: np.ndarray  # of each component

    def __init__(self, n_components: int) -> None:
        self.n_components = n_components

    def fit(self, cells: sp.csr_matrix, labels: None = None) -> Self:
        """Fit to `cells`, `(n, features)`."""
        self.fit_transform(cells)
        return self

    def fit_transform(self, cells: sp.csr_matrix, labels: None = None) -> np.ndarray:
        """Fit to `cells`, `(n, features)`, and return their components."""
        mean = mean_variance_axis(cells, axis=0)[0]
        smaller = min(cells.shape)

        def project(x: np.ndarray) -> np.ndarray:
            return cells @ x - mean @ x

        def combine(x: np.ndarray) -> np.ndarray:
            return cells.T @ x - np.multiply.outer(mean, x.sum(0))

        is_wide = cells.shape[0] < cells.shape[1]
        if is_wide:
            project, combine = combine, project
        gram = LinearOperator((smaller, smaller), lambda x: combine(project(x)), dtype=cells.dtype)
        start = np.random.RandomState(0).uniform(-1, 1, smaller)
        basis = np.eye(smaller, self.n_components, dtype=cells.dtype)
        # ARPACK takes neither one gene nor cells without any counts
        if smaller > 1 and gram.matvec(start).any():
            basis = np.linalg.qr(eigsh(gram, self.n_components, v0=start, rng=0)[1])[0]
        left, lengths, right = svd(project(basis), full_matrices=False)
        left, right = (basis @ right.T, left.T) if is_wide else (left, right @ basis.T)
        left, right = svd_flip(left, right, u_based_decision=False)
        rank = max(1, int((lengths > NO_SPREAD * lengths[0]).sum()))
        self.components_ = right[:rank]
        self.explained_variance_ = lengths[:rank] ** 2 / (cells.shape[0] - 1)
        self._center = mean @ self.components_.T
        return np.asarray(left[:, :rank] * lengths[:rank])

    def transform(self, cells: sp.csr_matrix) -> np.ndarray:
        """Components of `cells`, `(n, features)`."""
        return np.asarray(cells @ self.components_.T - self._center)


def pca(shape: Sequence[int], components: int = COMPONENTS) -> PrincipalComponents:
    """Unfitted principal components for an array of `shape`, fewer than `components` if it is
    small.
    """
    return PrincipalComponents(max(1, min(components, *(size - 1 for size in shape))))


@dataclass(frozen=True)
class EvaluatedModel:
    """The exported model, and what can be derived from it and its training shards."""

    network: Model  # in eval mode, on its device
    config: dict[str, Any]  # its config.json
    vocabulary: Vocabulary
    tokens: Tokens
    manifest: Manifest  # of its training corpus
    seed: int

    @property
    def supervised_by(self) -> list[str]:
        """obs columns whose labels the model, or the model that it started from, was trained with."""
        return sorted(
            {*self.network.objective.config.supervised_by, *self.config.get("supervised_by", [])}
        )

    @cached_property
    def untrained(self) -> Model:
        """The same architecture with initial weights of `seed`, in eval mode, on the same device."""
        model = to_empty(build(spec_of(self.config, self.vocabulary.n_genes)), "cpu")
        device = next(self.network.parameters()).device
        materialize(model, device, initial_tensors(model, self.seed, None, self.vocabulary))
        return model.eval()

    def is_training_cell(self, dataset: str, cells: pd.Index) -> np.ndarray:
        """Mask of the `cells` (obs names) of a dataset that are in training shards, bool."""
        found: set[str] = set()
        for shard in self.manifest.splits["train"].shards:
            for name in read_names(self.manifest.shard_path(shard), "obs"):
                of_dataset, _, cell = name.partition(":")
                if of_dataset == dataset:
                    found.add(cell)
        return np.asarray(cells.isin([*found]))

    @cached_property
    def gene_statistics(self) -> GeneStatistics:
        return read_gene_statistics(self.manifest, self.tokens)

    @cached_property
    def components(self) -> PrincipalComponents:
        """Principal components of log-normalised training cells, which several tasks compare with."""
        profiles = self.training_profiles()
        return pca(profiles.shape).fit(profiles)

    def training_profiles(self) -> sp.csr_matrix:
        """Log-normalised training cells, at most PCA_CELLS, `(cells, genes)` float32; read again at
        each call.
        """
        counts = read_training_counts(self.manifest, PCA_CELLS)[:PCA_CELLS]
        return log_normalise(summed(counts) if self.manifest.ordered else counts)


@dataclass(frozen=True)
class Context:
    """One dataset under evaluation."""

    dataset: str
    reader: CountsReader
    scored: np.ndarray
    """Cells to judge on, `(n_obs,)` bool: unseen in training unless `options.cells` is all, and
    with an embedding.
    """
    # embeddings of all cells, `(n_obs, hidden)` float32; NaN rows for cells without a known gene
    vectors: np.ndarray
    roles: Mapping[str, pd.Series]
    """obs columns by role, with the column's name: `label`, `label 2`, ... and `batch`, `donor`,
    `condition`, `perturbation`, `dose` and `is_control` (bool). Roles that the dataset lacks are
    absent.
    """
    model: EvaluatedModel
    options: Evaluate  # options that all tasks share: `folds`, `seed`, `cells`
    baselines: BaselineCache = field(default_factory=BaselineCache)
    # `seconds` and `peak_gb` of stage `embed`
    embedding_cost: Mapping[str, float] = field(default_factory=dict)
    external: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Embeddings of all cells by models of other packages, `(n_obs, width)` float32, finite;
    `evaluate.results`.
    """
    datasets: EvaluatedDatasets | None = None
    """All datasets of the evaluation, this one among them, for tasks that need several."""

    @cached_property
    def columns(self) -> GeneColumns:
        """Genes of the model in the dataset."""
        return match_columns(self.reader, self.model.vocabulary)

    @property
    def measured_genes(self) -> np.ndarray:
        """(M,) int64: rows of the model's vocabulary that the dataset has, ascending."""
        target = self.columns.target
        return np.unique(target[target >= 0]).astype(np.int64)

    @property
    def supervised(self) -> str | None:
        """Addition to the model's name in tables and verdicts if it was trained with labels."""
        columns = self.model.supervised_by
        label = self.roles.get("label")
        if label is not None and str(label.name) in columns:
            return f"supervised by this label ({label.name})"
        return f"supervised by {', '.join(columns)}" if columns else None


@dataclass(frozen=True)
class TaskResult:
    """Result of a task on one dataset: plain numbers, text, lists and mappings; None for a missing
    number, not NaN.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    """Table: `name`, optionally `kind` ("model", "variant", "baseline", "external", "ceiling"),
    then a key per column. `x_mean` and `x_sd` are shown as one column `x`; lists are kept in
    metrics.json and not shown.
    """
    metric: str | None = None
    """Column that ranks the rows, higher is better: drawn, and compared between runs."""
    verdicts: list[Verdict] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)  # single values beside the table
    skipped: str | None = None  # reason why the task does not apply to the dataset
    differences: list[dict[str, Any]] = field(default_factory=list)
    """Paired differences with their intervals (`evaluate.scores.differences`): in metrics.json, not
    shown.
    """
    confusion: dict[str, Any] | None = None
    """Of one `row`: `classes`, and `counts` of cells, a list by true class of lists by predicted
    class.
    """

    gaps: list[Gap] = field(default_factory=list)
    """Percent of the gap to a ceiling that the best rows close, of each column with a natural
    scale.
    """
    notes: list[str] = field(default_factory=list)
    """Sentences shown behind those of the verdicts, such as on cells that are not judged."""

    @classmethod
    def from_columns(
        cls,
        columns: list[ScoreColumn],
        numbers: dict[str, Any],
        judged: list[ScoreColumn] | None = None,
        **fields: Any,
    ) -> Self:
        """Table, verdicts, differences and gaps of `columns`; the first ranks the rows, and
        `fields` replace others.

        Columns that are not `judged`, by default all, are in the table alone.
        """
        judged = columns if judged is None else judged
        if "verdicts" not in fields:
            fields["verdicts"] = against_best(judged)
        computed = {
            "rows": table_rows(columns),
            "metric": columns[0].heading,
            "differences": differences(judged),
        }
        gaps = [gap for column in judged if (gap := column.gap()) is not None]
        return cls(**{"figures": numbers, "gaps": gaps} | computed | fields)

    def to_json(self) -> dict[str, Any]:
        """The task's entry in metrics.json."""
        entry = asdict(self)
        for verdict in entry["verdicts"]:
            if verdict["n"] is None:
                del verdict["n"]
        entry["gaps"] = [asdict(gap) | {"words": gap_words(gap)} for gap in self.gaps]
        closed = [
            f"{gap.column}: {f'{gap.model.name} ' if gap.model else ''}{gap_words(gap)}."
            for gap in self.gaps
        ]
        return entry | {"sentences": [*map(sentence, self.verdicts), *closed, *entry.pop("notes")]}


class Skipped(Exception):
    """Raised by a task that does not apply to a dataset: the reason, and single values beside it."""

    def __init__(self, reason: str, numbers: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.numbers = dict(numbers or {})


def supervised_name(name: str, supervised: str | None) -> str:
    """Name of a row of the model, with `supervised` behind its features if there is any."""
    features, plus, classifier = name.partition(" + ")
    return name if supervised is None else f"{features}, {supervised}{plus}{classifier}"


def _named_supervised(result: TaskResult, supervised: str) -> TaskResult:
    """Return the result with `supervised` behind the name of the model in rows, verdicts and
    differences.
    """
    others = {row["name"] for row in result.rows if row.get("kind") not in ("model", "variant")}

    def named(name: str) -> str:
        return name if name in others else supervised_name(name, supervised)

    rows = [row | {"name": named(row["name"])} for row in result.rows]
    verdicts = [replace(verdict, compared=named(verdict.compared)) for verdict in result.verdicts]
    differences = [line | {"compared": named(line["compared"])} for line in result.differences]
    confusion = result.confusion and result.confusion | {"row": named(result.confusion["row"])}
    gaps = [
        replace(gap, model=gap.model and replace(gap.model, name=named(gap.model.name)))
        for gap in result.gaps
    ]
    return replace(
        result,
        rows=rows,
        verdicts=verdicts,
        differences=differences,
        confusion=confusion,
        gaps=gaps,
    )


class Task:
    """Base of the built-in tasks; a class of a plug-in needs these two methods alone."""

    keeps_result = False  # computed once for all datasets, so not in a process of one dataset

    def __init__(self, config: Any) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Judge the model on one dataset. Raises Skipped, and DataError where the user named
        something unusable.
        """
        raise NotImplementedError


def run_task(task: Task, context: Context) -> TaskResult:
    """Result of a task, whose rows say with which labels the model was trained
    (`Context.supervised`).
    """
    try:
        with threadpool_limits(1):  # sums in one order: the same scores on any number of cores
            result = task.run(context)
    except Skipped as skipped:
        return TaskResult([], None, [], skipped.numbers, skipped=str(skipped))
    return result if context.supervised is None else _named_supervised(result, context.supervised)


def load_evaluated(model: Path, manifest: Path, shards: Manifest, seed: int) -> EvaluatedModel:
    """The exported model in the folder `model`. Raises DataError if the shards have another
    vocabulary.
    """
    network, vocabulary, tokens, config = load_for_inference(model)
    if vocabulary.digest != shards.vocabulary["digest"]:
        raise DataError(
            f"{manifest}: its vocabulary is {shards.vocabulary['digest'][:12]}, the model's {vocabulary.digest[:12]}; "
            "pass the manifest of the shards that the model was trained on"
        )
    return EvaluatedModel(network, config, vocabulary, tokens, shards, seed)
