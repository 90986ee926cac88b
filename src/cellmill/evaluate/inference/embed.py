"""Embed the cells of a file of counts with an exported model, and check that the result can be used.

Cells are tokenized as for the shards and packed without padding; the token budget only changes
rounding. An embedding without most of the model's genes does not represent the whole cell. On 700
PBMC, the cosine to the vector of the whole cell was .97 without half of the genes, and .81 without
nine tenths.
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

WARN_BELOW_EXPRESSED_FRAC = 0.5  # least `GeneCoverage.expressed_frac` without a warning
ROW_BLOCK = 1024  # cells read at once


@dataclass(frozen=True)
class GeneCoverage:
    """Genes of the vocabulary with a column in the file."""

    n_present: int
    n_genes: int  # of the vocabulary
    # share of a training cell's genes that are measured, on average: genes weighted by the cells
    # that express them
    expressed_frac: float
    absent: tuple[str, ...]  # symbols of the most widely expressed genes that the file lacks

    def __str__(self) -> str:
        more = ", ..." if self.n_genes - self.n_present > len(self.absent) else ""
        lacks = f" (without {', '.join(self.absent)}{more})" if self.absent else ""
        return (
            f"{self.n_present:,} of the model's {self.n_genes:,} genes, "
            f"{self.expressed_frac:.1%} of the genes that a training cell expresses{lacks}"
        )


def gene_coverage(columns: GeneColumns, vocabulary: Vocabulary) -> GeneCoverage:
    """Coverage of `vocabulary` by a file with these columns.

    Genes of imported models, which have no numbers of cells, have equal weights.
    """
    present = np.zeros(vocabulary.n_genes, dtype=bool)
    present[columns.target[columns.target >= 0]] = True
    cells = vocabulary.n_cells.astype(np.float64)
    weights = cells if cells.any() else np.ones(vocabulary.n_genes)
    absent = np.flatnonzero(~present)
    widely_expressed = absent[np.argsort(-weights[absent], kind="stable")][:3]
    frac = float(weights[present].sum() / weights.sum())
    return GeneCoverage(
        int(present.sum()),
        vocabulary.n_genes,
        frac,
        tuple(vocabulary.symbols[row] for row in widely_expressed),
    )


@dataclass(frozen=True)
class FileCoverage:
    """Counts and genes of a file that the model knows."""

    coverage_frac: float  # fraction of the cells' counts that fall on genes of the vocabulary
    n_without_genes: int  # cells without a count on these genes
    genes: GeneCoverage
    lost_frac: float  # fraction of the file's counts on genes whose names are not known
    lost_names: tuple[str, ...]  # the names with most of these counts
    absent_columns: tuple[str, ...]  # covariates of the model that the file has no obs column of
    gene_notes: tuple[str, ...]  # lines on how the names of the file's genes were read


@dataclass(frozen=True)
class Embedding(FileCoverage):
    """Vectors of cells, and the coverage of their file."""

    # `(cells, hidden)` float32; NaN where a cell has no gene that the model knows
    vectors: np.ndarray
    earlier_s: float  # seconds that killed processes took for the vectors that they saved


class ColumnCounts:
    """Sum of the counts in each column of a file, (columns,) float64: over all cells, and over the
    chosen cells.
    """

    def __init__(self, n_columns: int) -> None:
        self.all_cells = np.zeros(n_columns)
        self.chosen_cells = np.zeros(n_columns)

    def tally(
        self, blocks: Iterable[sp.csr_matrix], chosen: np.ndarray, first: int = 0
    ) -> Iterator[sp.csr_matrix]:
        """Yield the `blocks` of a file from row `first` on, and add each to the sums. `chosen` is bool,
        (n_obs,).
        """
        block_start = first
        for block in blocks:
            is_chosen = chosen[block_start : block_start + block.shape[0]]
            block_start += block.shape[0]
            sums = self._sum(block)
            self.all_cells += sums
            self.chosen_cells += sums if is_chosen.all() else self._sum(block[is_chosen])
            yield block

    @property
    def sums(self) -> dict[str, np.ndarray]:
        """The sums by name; `tally` changes them in place."""
        return {"all_cells": self.all_cells, "chosen_cells": self.chosen_cells}

    def _sum(self, block: sp.csr_matrix) -> np.ndarray:
        return np.bincount(block.indices, block.data, len(self.all_cells))

    def coverage_frac(self, columns: GeneColumns) -> float:
        """Share of the chosen cells' counts that fall on genes of the vocabulary."""
        if columns.ordered:
            return 1.0
        known = self.chosen_cells[columns.target >= 0].sum()
        return float(known / self.chosen_cells[columns.measured].sum())


class InferenceModel(NamedTuple):
    """An exported model that is ready to embed cells."""

    network: Model  # in eval mode, on a GPU if there is one
    vocabulary: Vocabulary
    tokens: Tokens
    config: dict[str, Any]  # its config.json


def load_for_inference(folder: Path) -> InferenceModel:
    """Read the exported model in `folder`. Raises DataError for a damaged file."""
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
    """Raise ConfigError if `network.embed` gives its heads vectors of another block than training did."""
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
    """Tokens of the chosen cells of a file: a batch for each of `blocks`, counts of consecutive rows
    from row `first` of the file on. A block without a chosen cell has no batch.

    `chosen` is bool, `(n_obs,)`, None for all cells. Cells without a known gene are left out.
    `Batch.cell_ids` are rows of the file, or positions in `blocks` if these are only some of its cells.
    `per_cell` has further fields of a batch, such as levels, by cell id. With `with_counts`, batches
    have the counts of their tokens.
    """
    inverse = inverse_medians(vocabulary.medians)
    tokenizer = BatchTokenizer(tokens, vocabulary.n_genes, variability=vocabulary.variability)
    block_start = first
    for block in blocks:
        n = block.shape[0]
        kept = np.arange(n)
        if chosen is not None:
            kept = np.flatnonzero(chosen[block_start : block_start + n])
        cells = kept + block_start
        block_start += n
        if not len(kept):
            continue
        known = block[kept] if len(kept) < n else block
        if not columns.ordered:
            known = select_columns(known, columns.target, vocabulary.n_genes)
        has_genes = np.diff(known.indptr) > 0
        known = select_rows(known, has_genes)
        cells = cells[has_genes].astype(np.int64)
        genes = columns.target[known.indices] if columns.ordered else known.indices
        counts = SparseCounts(known.indptr.astype(np.int64), genes, known.data)
        if not columns.ordered:
            counts = rank_order_rows(counts, inverse)
        yield tokenizer.make_batch(counts, cells, with_counts).with_cell_fields(per_cell)


def embed_cells(
    reader: CountsReader,
    model: InferenceModel,
    section: Embed,
    chosen: np.ndarray | None = None,
    saved: SavedWork | None = None,
) -> Embedding:
    """Embeddings of the chosen cells, in file order. `chosen` is bool, `(n_obs,)`, None for all cells.
    What a killed process has put into `saved` is not computed again.

    Raises DataError if the model knows too few of the file's counts, or the file has too few of the
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
    # all is lazy: a block is saved when the next one is asked for, after it was summed and embedded
    blocks = saved_vectors.save_rows(blocks)
    blocks = column_counts.tally(blocks, chosen, first)
    per_cell = {"levels": read_levels(reader, network)}
    batches = tokenize_blocks(
        blocks,
        columns,
        vocabulary,
        tokens,
        chosen,
        per_cell=per_cell,
        first=first,
    )
    write_vectors(batches, network, vectors, section.token_budget, section.precision)
    if not chosen.all():  # else a copy would double the memory
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
    """Coverage of a file that was read to its end.

    `columns` are the result of `match_columns`. `has_genes`, bool (cells,), is False for cells
    without a gene of the model. Raises DataError as `embed_cells` does.
    """
    if not has_genes.any():
        raise DataError(f"{reader.path}: no cell has a count on a gene that the model knows")
    frac = column_counts.coverage_frac(columns)
    genes = gene_coverage(columns, model.vocabulary)
    _check_coverage(reader, columns, section, frac, genes)
    reader.warn_of_values()
    notes = columns.notes
    if columns.mismatch is not None:
        notes = (f"warning: {columns.mismatch}", *notes)
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
    """Raise DataError if the model knows too few counts of the file, or too few genes are in it."""
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
    if columns.mismatch is not None:
        return f"{columns.mismatch}; use a model of that organism, or one trained on both"
    flag = option.replace("_", "-")
    return f"use a model of these genes, or lower it (--{flag}, in Python {option})"


def read_levels(reader: CountsReader, model: Model) -> np.ndarray:
    """(n_obs, columns) int32: codes of the levels of a file's cells that `model` reads, for
    `tokenize_blocks`.
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
    """Vectors of cells 0 to `n_cells` - 1, `(n_cells, hidden)` float32; NaN rows where no batch has
    the cell.
    """
    vectors = np.full((n_cells, model.vector_width), np.nan, np.float32)
    write_vectors(batches, model, vectors, token_budget, precision)
    return vectors


def write_vectors(
    batches: Iterable[Batch], model: Model, vectors: np.ndarray, token_budget: int, precision: str
) -> None:
    """Put the vectors of the cells of `batches` into their rows of `vectors`."""
    model.eval()
    device = next(model.parameters()).device
    with inference_mode(device, precision):
        for batch in batches:
            for micro_batch in split_batch(batch, token_budget):
                embedded = model.embed(to_tensors(micro_batch, device)).float()
                vectors[micro_batch.cell_ids] = embedded.cpu().numpy()


@contextmanager
def inference_mode(device: torch.device, precision: str) -> Iterator[None]:
    """Run models without gradients, in the number format `precision` (option of `embed` and `evaluate`)."""
    with (
        torch.inference_mode(),
        torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"),
    ):
        yield


def describe_limits(embedding: FileCoverage) -> list[str]:
    """Lines on what limits the use of the vectors."""
    lines = [*embedding.gene_notes]
    line = lost_counts(embedding.lost_frac, embedding.lost_names)
    if line:
        lines.append(line)
    if embedding.coverage_frac < Embed.model_validate({}).min_coverage_frac:
        lines.append(
            f"warning: only {embedding.coverage_frac:.1%} of its counts fall on genes that the model knows: compare "
            "its vectors with each other only"
        )
    if embedding.genes.expressed_frac < WARN_BELOW_EXPRESSED_FRAC:
        lines.append(
            f"warning: it measures {embedding.genes}: compare its vectors with each other only"
        )
    names = ", ".join(embedding.absent_columns)
    if names:
        lines.append(
            f"warning: it has no obs column {names}, from which the model makes a token of each cell; it takes the "
            "token of an unknown value"
        )
    n = embedding.n_without_genes
    if n:
        lines.append(f"{n:,} cells have no gene that the model knows: their rows are NaN")
    return lines
