"""What is evaluated: the exported model, the datasets, and the cells that the model was trained on.

Held-out cells are in no training or validation shard of the model's corpus or of its ancestors'
corpora; digests in the model's folder stand in for shards of ancestors that are not here. A cell is
recognised by dataset and obs name and, under any name, by its counts of the vocabulary's genes.
Different cells with few counts may be equal by chance; these do not count as held out either.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.corpus import IS_CONTROL, ROLES
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.arrays import log_normalise, rank_buckets, summed
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.rows import SparseCounts
from cellmill.data.shards.cell_digests import CorpusDigests
from cellmill.data.shards.manifest import READ, Manifest, record, verify_changed
from cellmill.data.shards.reader import read_names
from cellmill.data.stream.cell_tokenizer import CellTokenizer
from cellmill.errors import DataError
from cellmill.evaluate.components import PrincipalComponents, pca
from cellmill.evaluate.inference.embed import load_for_inference
from cellmill.evaluate.inference.files import read_embedding
from cellmill.evaluate.inference.ridge import GeneRidge
from cellmill.evaluate.inference.seen import (
    as_hashed,
    describe_unfindable_cells,
    find_barcodes,
    find_equal_cells,
    read_blocks,
    read_hashes,
)
from cellmill.models.build import build
from cellmill.models.export import initial_tensors, spec_of
from cellmill.models.family import Model
from cellmill.models.objective import GeneStatistics
from cellmill.parallel.materialize import materialize, to_empty

# training cells read, in whole blocks; shards are preshuffled: the first ones are a random sample
MAX_TRAIN_CELLS = 200_000
PCA_CELLS = 10_000


@dataclass(frozen=True)
class DatasetFiles:
    """Files of a dataset under evaluation, and its label columns."""

    cells: Path
    embedding: Path
    labels: list[str]  # obs columns
    external: Sequence[Path] = ()  # embeddings by models of other packages


def is_label(role: str) -> bool:
    """True for `label`, `label 2` and so on."""
    return role.partition(" ")[0] == "label"


class OpenDataset(NamedTuple):
    """A dataset whose file is open; the fields are those that `task.Context` describes."""

    reader: CountsReader
    vectors: np.ndarray
    roles: dict[str, pd.Series]


@dataclass(frozen=True)
class EvaluatedDatasets:
    """Datasets by name. Embeddings must come from the model with weights `digest` and be `width`
    wide.
    """

    files: Mapping[str, DatasetFiles]
    digest: str
    width: int

    @contextmanager
    def open(self, name: str) -> Iterator[OpenDataset]:
        """Open the dataset `name`. Raises DataError for a damaged file.

        Its roles are the labels, and the columns of preprocessed cells that are named like a role.
        """
        files = self.files[name]
        columns = {
            "label" if number == 1 else f"label {number}": column
            for number, column in enumerate(files.labels, start=1)
        }
        with open_dataset(files.cells) as reader:
            vectors = read_embedding(files.embedding, reader.obs_names, self.digest, self.width)
            columns |= {role: role for role in (*ROLES, IS_CONTROL) if role in reader.obs_columns}
            roles = {
                role: reader.obs_column(column, f"the dataset's {role}")
                for role, column in columns.items()
            }
            yield OpenDataset(reader, vectors, roles)


@dataclass(frozen=True)
class EvaluatedModel:
    """The exported model, and what can be derived from it and its training shards."""

    network: Model  # in eval mode, on its device
    config: dict[str, Any]  # its config.json
    vocabulary: Vocabulary
    tokens: Tokens
    manifest: Manifest  # manifest of its training corpus
    seed: int
    ridge: GeneRidge | None = None  # predicts hidden genes together with the decoder

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
        """(cells,) bool: True for the obs names in `cells` that a training shard has for `dataset`."""
        names = {
            name
            for dataset_of_cell, name in _iterate_names(self.manifest, ["train"])
            if dataset_of_cell == dataset
        }
        return np.asarray(cells.isin([*names]))

    @cached_property
    def gene_statistics(self) -> GeneStatistics:
        """Statistics of the genes of training cells."""
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
        counts = read_counts(self.manifest, PCA_CELLS)
        return log_normalise(summed(counts) if self.manifest.ordered else counts)


def load_evaluated(model: Path, manifest: Manifest, seed: int) -> EvaluatedModel:
    """The exported model in the folder `model`. Raises DataError if the shards of `manifest` have
    another vocabulary.
    """
    network, vocabulary, tokens, config = load_for_inference(model)
    digest = manifest.vocabulary["digest"]
    if vocabulary.digest != digest:
        raise DataError(
            f"{manifest.path}: its vocabulary is {digest[:12]}, the model's {vocabulary.digest[:12]}; "
            "pass the manifest of the shards that the model was trained on"
        )
    ridge = GeneRidge.read(model, config)
    return EvaluatedModel(network, config, vocabulary, tokens, manifest, seed, ridge)


class TrainedCells:
    """Training and validation cells of the model and its ancestors.

    Those of `manifests` are read from shards. Of other corpora, `listed` has digests by fingerprint.
    Raises DataError for a changed shard.
    """

    def __init__(
        self,
        manifests: Sequence[Manifest],
        datasets: Iterable[str],
        listed: Mapping[str, CorpusDigests] = MappingProxyType({}),
    ) -> None:
        self.names: dict[str, set[str]] = {name: set() for name in datasets}  # obs names by dataset
        for manifest in manifests:
            if verify_changed(manifest):
                record(manifest)
            for dataset, name in _iterate_names(manifest, READ):
                if dataset in self.names:
                    self.names[dataset].add(name)
        by_fingerprint = {manifest.fingerprint: manifest for manifest in manifests}
        self.corpora = [read_hashes(manifest) for manifest in by_fingerprint.values()]
        self._listed = [listed[name] for name in sorted(listed.keys() - by_fingerprint.keys())]
        self.corpora += [as_hashed(corpus) for corpus in self._listed]

    def unseen(self, dataset: str, reader: CountsReader) -> tuple[np.ndarray, int]:
        """Mask, bool `(n_obs,)`, of the cells that were not trained on, and the number of copies of
        training cells under other names. Prints the copies.
        """
        unnamed = ~reader.obs_names.isin([*self.names[dataset]])
        copies = find_equal_cells(reader, self.corpora, unnamed)
        near = unnamed & ~copies & find_barcodes(reader, self._listed)
        for mask, relation in (
            (copies, "are equal to training or validation cells of other names"),
            (near, "have barcodes of a training sample of a model before this one"),
        ):
            if mask.any():
                print(f"{dataset}: {int(mask.sum()):,} cells {relation}: not held out", flush=True)
        for line in describe_unfindable_cells(reader, self.corpora, self._listed):
            print(f"{dataset}: warning: {line}", flush=True)
        copies |= near
        return unnamed & ~copies, int(copies.sum())


def _iterate_names(manifest: Manifest, splits: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Dataset and obs name of each cell of the splits."""
    for split in splits:
        for shard in manifest.splits[split].shards:
            for dataset_and_name in read_names(manifest.shard_path(shard), "obs"):
                dataset, _, name = dataset_and_name.partition(":")
                yield dataset, name


def read_gene_statistics(manifest: Manifest, tokens: Tokens) -> GeneStatistics:
    """Statistics over the first MAX_TRAIN_CELLS cells of the training shards, or the whole blocks
    that have them.
    """
    n_genes = manifest.n_genes
    n_cells = 0
    total = np.zeros(n_genes)
    by_rank = np.zeros((tokens.max_tokens.bit_length(), n_genes), np.int64)
    tokenizer = CellTokenizer(tokens, n_genes, variability=manifest.variability)
    for block in _read_first_blocks(manifest, MAX_TRAIN_CELLS, "train"):
        batch = tokenizer.batch(block, np.arange(block.n_cells))
        genes = batch.token_ids - len(SPECIAL)
        # position of each token in its cell, by powers of two
        cell_starts = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens))
        buckets = rank_buckets(np.arange(len(genes)) - cell_starts)
        n_pairs = np.bincount(buckets * n_genes + genes, minlength=by_rank.size)
        by_rank += n_pairs.reshape(by_rank.shape)
        total += np.bincount(genes, weights=batch.values, minlength=n_genes)
        n_cells += block.n_cells
    n_by_gene = by_rank.sum(0)
    overall = float(total.sum() / max(n_by_gene.sum(), 1))
    means = np.where(n_by_gene > 0, total / np.maximum(n_by_gene, 1), overall)
    return GeneStatistics(n_by_gene, means, overall, n_cells, by_rank)


def read_counts(manifest: Manifest, max_cells: int, split: str = "train") -> sp.csr_matrix:
    """Counts of the first `max_cells` cells of a split, or of all if there are fewer: `(cells,
    genes)`, uint32.
    """
    blocks: list[sp.csr_matrix] = []
    n_missing = max_cells
    for block in _read_first_blocks(manifest, max_cells, split):
        n_cells = min(block.n_cells, n_missing)
        offsets = block.offsets[: n_cells + 1]
        counts = block.counts[: offsets[-1]].astype(np.uint32)
        values = (counts, block.genes[: offsets[-1]], offsets)
        blocks.append(sp.csr_matrix(values, shape=(n_cells, manifest.n_genes)))
        n_missing -= n_cells
    return sp.vstack(blocks, format="csr")


def _read_first_blocks(manifest: Manifest, max_cells: int, split: str) -> Iterator[SparseCounts]:
    """Whole blocks of cells of a split, until they have `max_cells`."""
    n_cells = 0
    for block in read_blocks(manifest, split):
        if n_cells >= max_cells:
            return
        n_cells += block.n_cells
        yield block
