"""Embed the cells of a file of counts with an exported model, and check that the vectors can be used.

Cells are tokenized in the same way as for the shards. The tokens of several cells are packed into one
pass of the model, without padding. The token budget, the size of a pass, changes only rounding errors.

A vector that is computed without most of the model's genes does not represent the whole cell. On 700 PBMC,
such vectors were compared with the vectors of the whole cells. The cosine between them was .97 without
half of the genes, and .81 without nine tenths of the genes.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch

from cellmill.config.checks import check_rows
from cellmill.config.corpus import DATASET
from cellmill.config.parts.tokens import Tokens
from cellmill.config.run import Embed
from cellmill.data.arrays import select_columns, select_rows
from cellmill.data.genes.names import LOST_NAMES, GeneColumns, lost_counts, match_columns
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.rank_order import inverse_medians, rank_order_rows
from cellmill.data.rows import SparseCounts
from cellmill.data.saved_work import SavedWork
from cellmill.data.shards.obs import encode_columns
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.batch_tokenizer import BatchTokenizer
from cellmill.data.stream.micro_batches import split_batch
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.inference.saved_vectors import SavedVectors
from cellmill.files import progress
from cellmill.models.batch import to_tensors
from cellmill.models.export import load_model, spec_of
from cellmill.models.family import Model

WARN_BELOW_EXPRESSED_FRAC = 0.5  # a smaller `GeneCoverage.expressed_frac` is warned of
ROW_BLOCK = 1024  # at most this many cells are read at once
MAX_ABSENT = 3  # at most this many absent genes are named


@dataclass(frozen=True)
class GeneCoverage:
    """How many of the vocabulary's genes a file measures."""

    n_present: int  # genes of the vocabulary with a column in the file
    n_genes: int  # genes of the vocabulary
    # A training cell expresses some genes, and the file measures a share of these genes. This is that
    # share on average: each gene is weighted by the number of training cells that express the gene.
    expressed_frac: float
    # symbols of at most MAX_ABSENT genes that the file lacks, the most widely expressed first
    absent: tuple[str, ...]

    def __str__(self) -> str:
        more = ", ..." if self.n_genes - self.n_present > len(self.absent) else ""
        lacks = f" (without {', '.join(self.absent)}{more})" if self.absent else ""
        return (
            f"{self.n_present:,} of the model's {self.n_genes:,} genes, "
            f"{self.expressed_frac:.1%} of the genes that a training cell expresses{lacks}"
        )


def measure_gene_coverage(columns: GeneColumns, vocabulary: Vocabulary) -> GeneCoverage:
    """Measure how much of `vocabulary` a file with these `columns` covers.

    Genes are weighted by the number of training cells that express them. An imported model has no such
    numbers, so all its genes have the same weight.
    """
    is_present = np.zeros(vocabulary.n_genes, dtype=bool)
    is_present[columns.target[columns.target >= 0]] = True
    n_cells = vocabulary.n_cells.astype(np.float64)
    weights = n_cells if n_cells.any() else np.ones(vocabulary.n_genes)
    absent = np.flatnonzero(~is_present)
    widely_expressed = absent[np.argsort(-weights[absent], kind="stable")][:MAX_ABSENT]
    expressed_frac = float(weights[is_present].sum() / weights.sum())
    return GeneCoverage(
        int(is_present.sum()),
        vocabulary.n_genes,
        expressed_frac,
        tuple(vocabulary.symbols[row] for row in widely_expressed),
    )


@dataclass(frozen=True)
class FileCoverage:
    """How many of a file's counts and genes the model knows."""

    coverage_frac: (
        float  # fraction of the chosen cells' counts that fall on genes of the vocabulary
    )
    n_without_genes: int  # chosen cells without a count of the vocabulary's genes
    genes: GeneCoverage
    lost_frac: float  # fraction of the file's counts that fall on genes with unknown names
    lost_names: tuple[str, ...]  # the unknown names with most counts
    absent_columns: tuple[str, ...]  # covariates of the model for which the file has no obs column
    gene_notes: tuple[str, ...]  # sentences on how the names of the file's genes were read


@dataclass(frozen=True)
class Embedding(FileCoverage):
    """Vectors of the chosen cells of a file, and the coverage of the file."""

    # (chosen cells, hidden) float32; a cell without counts of the model's genes has a row of NaN
    vectors: np.ndarray
    earlier_s: float  # seconds that killed processes spent on the vectors that they had saved


class ColumnCounts:
    """Sum of the counts in each column of a file, over all cells and over the chosen cells.

    Both sums are (columns,) float64.
    """

    def __init__(self, n_columns: int) -> None:
        self.all_cells = np.zeros(n_columns)
        self.chosen_cells = np.zeros(n_columns)

    def tally(
        self, blocks: Iterable[sp.csr_matrix], chosen: np.ndarray, first: int = 0
    ) -> Iterator[sp.csr_matrix]:
        """Yield the `blocks` of a file, and add the counts of each block to the sums.

        The first block begins at row `first` of the file. `chosen`, (n_obs,) bool, marks the chosen
        cells.
        """
        block_start = first
        for block in blocks:
            is_chosen = chosen[block_start : block_start + block.shape[0]]
            block_start += block.shape[0]
            sums = self._sum_columns(block)
            self.all_cells += sums
            self.chosen_cells += sums if is_chosen.all() else self._sum_columns(block[is_chosen])
            yield block

    @property
    def sums(self) -> dict[str, np.ndarray]:
        """Both sums by name. `tally` changes the arrays in place."""
        return {"all_cells": self.all_cells, "chosen_cells": self.chosen_cells}

    def _sum_columns(self, block: sp.csr_matrix) -> np.ndarray:
        return np.bincount(block.indices, block.data, len(self.all_cells))

    def coverage_frac(self, columns: GeneColumns) -> float:
        """Share of the chosen cells' counts that fall on genes of the vocabulary.

        A file of ordered genes has no counts, and always has the share 1.
        """
        if columns.ordered:
            return 1.0
        known = self.chosen_cells[columns.target >= 0].sum()
        return float(known / self.chosen_cells[columns.measured].sum())


class InferenceModel(NamedTuple):
    """An exported model that is ready to embed cells."""

    network: Model  # in eval mode, on a GPU if there is one
    vocabulary: Vocabulary
    tokens: Tokens
    config: dict[str, Any]  # content of config.json


def load_for_inference(folder: Path) -> InferenceModel:
    """Read the exported model in `folder`, onto a GPU if there is one.

    Raises DataError for a damaged file.
    """
    network, vocabulary, config = load_model(folder)
    if torch.cuda.is_available():
        network.to("cuda")
    elif "SLURM_GPUS_ON_NODE" in os.environ:
        print(
            f"warning: torch {torch.__version__} sees none of this job's GPUs: computing on CPU cores",
            flush=True,
        )
    tokens = spec_of(config, vocabulary.n_genes).tokens
    return InferenceModel(network, vocabulary, tokens, config)


def check_heads(network: Model) -> None:
    """Raise ConfigError if the heads of `network` would get other vectors than in training.

    Training gives heads the vectors of the last block. `network.embed` returns vectors of an earlier
    block if option `embed_layer` is set.
    """
    layer = getattr(getattr(network, "config", None), "embed_layer", 0)
    if layer:
        raise ConfigError(
            "model.embed_layer: expected 0 in a model that predicts from vectors, because it was trained on those of "
            f"the last block, got {layer}; set it to 0 in the model's config.json, or train it again"
        )


def tokenize_blocks(
    blocks: Iterable[sp.csr_matrix],
    columns: GeneColumns,
    vocabulary: Vocabulary,
    tokens: Tokens,
    chosen: np.ndarray | None = None,
    with_counts: bool = False,
    per_cell: Mapping[str, np.ndarray | None] = MappingProxyType({}),
    first: int = 0,
) -> Iterator[Batch]:
    """Yield the tokens of the chosen cells: one batch for each block of counts.

    `blocks` have the counts of consecutive cells, and the first block begins with cell `first`.
    `Batch.cell_ids` numbers the cells in the order of `blocks`, from `first` on. If `blocks` is a whole
    file, these numbers are the rows of the file.

    `chosen`, (cells,) bool by cell id, marks the chosen cells; None chooses all cells. A cell without a
    gene that the vocabulary has is left out, and a block without a chosen cell has no batch.

    `per_cell` has arrays with a row for each cell id, such as the levels; batches get them as further
    fields. With `with_counts`, batches also have the counts of their tokens.
    """
    inverse = inverse_medians(vocabulary.medians)
    tokenizer = BatchTokenizer(tokens, vocabulary.n_genes, variability=vocabulary.variability)
    block_start = first
    for block in blocks:
        # keep the rows of the chosen cells
        n = block.shape[0]
        kept_rows = np.arange(n)
        if chosen is not None:
            kept_rows = np.flatnonzero(chosen[block_start : block_start + n])
        cell_ids = kept_rows + block_start
        block_start += n
        if not len(kept_rows):
            continue
        known = block[kept_rows] if len(kept_rows) < n else block

        # keep the genes of the vocabulary, then the cells that have any of them
        if not columns.ordered:
            known = select_columns(known, columns.target, vocabulary.n_genes)
        has_genes = np.diff(known.indptr) > 0
        known = select_rows(known, has_genes)
        cell_ids = cell_ids[has_genes].astype(np.int64)

        # order the genes of each cell by rank, unless the file has ordered them
        genes = columns.target[known.indices] if columns.ordered else known.indices
        counts = SparseCounts(known.indptr.astype(np.int64), genes, known.data)
        if not columns.ordered:
            counts = rank_order_rows(counts, inverse)
        yield tokenizer.make_batch(counts, cell_ids, with_counts).with_cell_fields(per_cell)


def embed_cells(
    reader: CountsReader,
    model: InferenceModel,
    section: Embed,
    chosen: np.ndarray | None = None,
    saved: SavedWork | None = None,
) -> Embedding:
    """Compute the vectors of the chosen cells of a file, in file order.

    `chosen`, (n_obs,) bool, marks the chosen cells; None chooses all cells. Vectors that a killed process
    has put into `saved` are not computed again.

    Raises DataError if the model knows too few of the file's counts, or if the file has too few of the
    model's genes.
    """
    network, vocabulary, tokens, _ = model
    chosen = np.ones(reader.n_obs, dtype=bool) if chosen is None else chosen
    check_rows(tokens, reader, str(reader.path))
    columns = match_columns(reader, vocabulary)
    column_counts = ColumnCounts(reader.n_vars)
    vectors = np.full((reader.n_obs, network.vector_width), np.nan, np.float32)
    saved = saved or SavedWork(reader.path, None)
    saved_vectors = SavedVectors(saved, reader, column_counts.sums, vectors)
    saved_vectors.restore()
    first = saved_vectors.first
    blocks = progress(
        reader.rows(ROW_BLOCK, first), f"embed {reader.path.stem}", reader.n_obs - first
    )
    # These generators are lazy: they pass on one block at a time. `save_rows` saves the vectors of a
    # block when it is asked for the next block. By then the block was summed and embedded.
    blocks = saved_vectors.save_rows(blocks)
    blocks = column_counts.tally(blocks, chosen, first)
    per_cell = {"levels": read_levels(reader, network)}
    batches = tokenize_blocks(
        blocks, columns, vocabulary, tokens, chosen, per_cell=per_cell, first=first
    )
    write_vectors(batches, network, vectors, section.token_budget, section.precision)
    if not chosen.all():  # indexing copies the vectors, and needs twice their memory
        vectors = vectors[chosen]
    has_vector = np.isfinite(vectors[:, 0])
    coverage = measure_coverage(reader, columns, model, section, column_counts, has_vector)
    return Embedding(**vars(coverage), vectors=vectors, earlier_s=saved_vectors.earlier_s)


def measure_coverage(
    reader: CountsReader,
    columns: GeneColumns,
    model: InferenceModel,
    section: Embed,
    column_counts: ColumnCounts,
    has_genes: np.ndarray,
) -> FileCoverage:
    """Return how many counts and genes of a file the model knows. The file must have been read to its end.

    `columns` are the result of `match_columns`. `column_counts` has tallied all blocks of the file.
    `has_genes`, (chosen cells,) bool, is False for cells without counts of the model's genes.

    Raises DataError if the model knows too few of the file's counts, or if the file has too few of the
    model's genes. `section` has both bounds.
    """
    if not has_genes.any():
        raise DataError(f"{reader.path}: no cell has a count on a gene that the model knows")
    frac = column_counts.coverage_frac(columns)
    genes = measure_gene_coverage(columns, model.vocabulary)
    _check_coverage(reader, columns, section, frac, genes)
    reader.warn_of_values()
    notes = columns.notes
    if columns.mismatch is not None:
        notes = (f"warning: {columns.mismatch}", *notes)
    # columns of genes with unknown names, the largest sum of counts first
    unnamed = np.flatnonzero([] if columns.unnamed is None else columns.unnamed).tolist()
    lost = sorted(unnamed, key=lambda column: -column_counts.all_cells[column])
    measured_counts = column_counts.all_cells[columns.measured].sum()
    return FileCoverage(
        coverage_frac=frac,
        n_without_genes=int((~has_genes).sum()),
        genes=genes,
        lost_frac=float(column_counts.all_cells[lost].sum() / max(measured_counts, 1)),
        lost_names=tuple(reader.var_names[column] for column in lost[:LOST_NAMES]),
        gene_notes=notes,
        absent_columns=tuple(
            name
            for name in model.tokens.covariates
            if name != DATASET and name not in reader.obs_columns
        ),
    )


def _check_coverage(
    reader: CountsReader,
    columns: GeneColumns,
    section: Embed,
    coverage_frac: float,
    genes: GeneCoverage,
) -> None:
    """Raise DataError if the model knows too few of the file's counts, or if the file has too few genes."""
    if coverage_frac < section.min_coverage_frac:
        raise DataError(
            f"{reader.path}: {coverage_frac:.1%} of its counts fall on genes that the model knows, "
            f"embed.min_coverage_frac is {section.min_coverage_frac:g}; "
            f"{_advise(columns, 'min_coverage_frac')}"
        )
    if genes.expressed_frac < section.min_expressed_frac:
        raise DataError(
            f"{reader.path}: it measures {genes}; embed.min_expressed_frac is "
            f"{section.min_expressed_frac:g}; "
            f"{_advise(columns, 'min_expressed_frac')}"
        )


def _advise(columns: GeneColumns, option: str) -> str:
    """Say what the user can do if a file falls below the bound in `option`."""
    if columns.mismatch is not None:
        return f"{columns.mismatch}; use a model of that organism, or one trained on both"
    flag = option.replace("_", "-")
    return f"use a model of these genes, or lower it (--{flag}, in Python {option})"


def read_levels(reader: CountsReader, model: Model) -> np.ndarray:
    """Read the level codes of a file's cells, (n_obs, columns) int32, in the obs columns that `model` reads.

    The codes are an entry of `per_cell` for `tokenize_blocks`.
    """
    known = model.objective.levels
    obs = reader.read_obs([*known, DATASET])
    return encode_columns(obs, reader.dataset or reader.path.stem, known)


def embed_batches(
    batches: Iterable[Batch],
    model: Model,
    n_cells: int,
    token_budget: int,
    precision: str = "32-true",
) -> np.ndarray:
    """Compute the vectors of cells 0 to `n_cells` - 1, (n_cells, hidden) float32.

    A cell that is in no batch has a row of NaN.
    """
    vectors = np.full((n_cells, model.vector_width), np.nan, np.float32)
    write_vectors(batches, model, vectors, token_budget, precision)
    return vectors


def write_vectors(
    batches: Iterable[Batch], model: Model, vectors: np.ndarray, token_budget: int, precision: str
) -> None:
    """Compute the vectors of the cells in `batches`, and write them into `vectors` at rows `cell_ids`."""
    model.eval()
    device = next(model.parameters()).device
    with inference_mode(device, precision):
        for batch in batches:
            for micro_batch in split_batch(batch, token_budget):
                embedded = model.embed(to_tensors(micro_batch, device)).float()
                vectors[micro_batch.cell_ids] = embedded.cpu().numpy()


@contextmanager
def inference_mode(device: torch.device, precision: str) -> Iterator[None]:
    """Run models without gradients, in the number format `precision`.

    `precision` is the option of that name in sections `embed` and `evaluate`.
    """
    with (
        torch.inference_mode(),
        torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"),
    ):
        yield


def describe_limits(
    coverage: FileCoverage, advice: str = "compare its vectors with each other only"
) -> list[str]:
    """Sentences on what limits the use of the vectors, or of values that are predicted from them.

    `advice` ends the warnings about a file with few counts or few genes that the model knows.
    """
    lines = [*coverage.gene_notes]
    line = lost_counts(coverage.lost_frac, coverage.lost_names)
    if line:
        lines.append(line)
    if coverage.coverage_frac < Embed.model_validate({}).min_coverage_frac:
        lines.append(
            f"warning: only {coverage.coverage_frac:.1%} of its counts fall on genes that the model knows: {advice}"
        )
    if coverage.genes.expressed_frac < WARN_BELOW_EXPRESSED_FRAC:
        lines.append(f"warning: it measures {coverage.genes}: {advice}")
    names = ", ".join(coverage.absent_columns)
    if names:
        lines.append(
            f"warning: it has no obs column {names}, from which the model makes a token of each cell; it takes the "
            "token of an unknown value"
        )
    n = coverage.n_without_genes
    if n:
        lines.append(f"{n:,} cells have no gene that the model knows: their rows are NaN")
    return lines
