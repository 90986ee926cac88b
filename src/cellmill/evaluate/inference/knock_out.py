"""In-silico knock-out: how far the embeddings of cells move if the counts of one gene are removed.

The shift of a cell is 1 minus the cosine between its embeddings with and without the gene (Theodoris et
al. 2023, Nature 618:616). The shift of a gene is the mean shift of the drawn cells that express the gene.

The shift of a gene is compared with the shifts of its null genes. These are the `null_genes` other genes
with the most similar expression. The expression of a gene is its mean over the cells that express it.
"""

from dataclasses import dataclass
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.run import Embed, KnockOut
from cellmill.data.arrays import divide, log_normalise, select_columns
from cellmill.data.genes.names import GeneColumns, match_columns, rows_of_known_genes
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.reader import CountsReader
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate import draws
from cellmill.evaluate.draws import draw_cells
from cellmill.evaluate.features.cell_features import keep_columns, read_rows
from cellmill.evaluate.inference.embed import (
    Embedding,
    InferenceModel,
    embed_batches,
    embed_cells,
    read_levels,
    tokenize_blocks,
)
from cellmill.files import progress


@dataclass(frozen=True)
class DrawnCells:
    """Drawn cells from which genes are removed."""

    model: InferenceModel
    options: Embed
    columns: GeneColumns  # says which row of the vocabulary each column of `counts` is
    counts: sp.csr_matrix  # (cells, columns of the file)
    levels: np.ndarray  # (cells, obs columns): level codes that the model reads
    profiles: sp.csc_matrix  # (cells, genes of the vocabulary): log(1 + counts per 10,000)
    directions: np.ndarray  # (cells, width) float64: vectors with all genes, scaled to length 1

    def measure_shifts(self, gene: int) -> tuple[np.ndarray, np.ndarray]:
        """Measure the shifts of the cells that express `gene`, a row of the vocabulary.

        Returns the cells (indices) and their shifts, float64. A cell that expresses no other gene is left
        out.
        """
        profiles = self.profiles
        expressing = profiles.indices[profiles.indptr[gene] : profiles.indptr[gene + 1]]
        block = keep_columns(self.counts[expressing], self.columns.target != gene)
        per_cell = {"levels": self.levels[expressing]}
        network, vocabulary, tokens, _ = self.model
        batches = tokenize_blocks([block], self.columns, vocabulary, tokens, per_cell=per_cell)
        vectors = embed_batches(
            batches, network, len(expressing), self.options.token_budget, self.options.precision
        )
        shifts = 1 - (_scale_to_unit(vectors) * self.directions[expressing]).sum(1)
        has_vector = np.isfinite(shifts)
        return expressing[has_vector], shifts[has_vector]


def knock_out_genes(
    reader: CountsReader, model: InferenceModel, embed: Embed, section: KnockOut
) -> tuple[ad.AnnData, Embedding]:
    """Remove one gene at a time from drawn cells, and measure the shifts.

    Returns the shifts, and the embedding of the drawn cells with all genes. The shifts are an AnnData of
    cells by removed genes. X, CSR float32, has an entry for each cell that expresses the gene.

    The rows of var are Ensembl ids, the gene with the largest z first. The columns of var are symbol,
    n_cells, expression (mean log(1 + counts per 10,000)), shift, null_mean, null_sd, z, and p. p is
    one-sided, and at least 1 / (null genes + 1).

    Raises DataError if the model knows too few of the file's counts, if the file has too few of the model's
    genes, or if every gene is rare. Raises ConfigError for a named gene that is unknown or rare.
    """
    vocabulary = model.vocabulary
    columns = match_columns(reader, vocabulary)
    if columns.ordered:
        raise DataError(
            f"{reader.path}: its genes are ordered and have no counts; knock_out removes counts from cells"
        )

    # draw and embed cells
    cells = draw_cells(
        np.arange(reader.n_obs), section.cells, section.seed, draws.KNOCKED_OUT_CELLS
    )
    is_drawn = np.isin(np.arange(reader.n_obs), cells)
    embedding = embed_cells(reader, model, embed, is_drawn)
    counts = read_rows(reader, cells)
    profiles = log_normalise(select_columns(counts, columns.target, vocabulary.n_genes)).tocsc()
    drawn = DrawnCells(
        model,
        embed,
        columns,
        counts,
        read_levels(reader, model.network)[is_drawn],
        profiles,
        _scale_to_unit(embedding.vectors),
    )

    # choose the genes to remove, and their null genes
    n_expressing = np.diff(profiles.indptr)
    expression = divide(np.asarray(profiles.sum(axis=0)).ravel(), n_expressing)
    usable = np.flatnonzero(n_expressing >= section.min_cells)
    removed = usable
    if section.genes is not None:
        removed = _find_named_genes(section.genes, section.min_cells, vocabulary, n_expressing)
    if not len(removed):
        raise DataError(
            f"{reader.path}: no gene has counts in more than {n_expressing.max():,} of the {len(cells):,} drawn cells, "
            f"knock_out.min_cells is {section.min_cells:,}; lower it"
        )
    null_genes = choose_null_genes(removed, usable, expression, section.null_genes)

    # remove these genes one at a time
    measured = sorted({*null_genes}.union(*null_genes.values()))
    title = f"knock_out {reader.path.stem}"
    steps = progress(measured, title, len(measured), "genes", size=lambda gene: 1)
    shifts_by_gene = {gene: drawn.measure_shifts(gene) for gene in steps}
    genes = _tabulate_genes(null_genes, shifts_by_gene, expression, vocabulary)

    # order the removed genes by z
    order = np.argsort(-genes["z"].to_numpy(), kind="stable")
    shifts = [shifts_by_gene[gene] for gene in removed[order].tolist()]
    matrix = _make_matrix(shifts, len(cells))
    return ad.AnnData(matrix, obs=reader.obs.iloc[cells], var=genes.iloc[order]), embedding


def _make_matrix(shifts: list[tuple[np.ndarray, np.ndarray]], n_cells: int) -> sp.csr_matrix:
    """Make a matrix of the `shifts` of each gene, (cells, genes) float32.

    `shifts` has, for each gene, the cells (indices) and their shifts.
    """
    ends = np.cumsum([0, *(len(gene_shifts) for _, gene_shifts in shifts)])
    cell_of_shift, values = map(np.concatenate, zip(*shifts))
    columns = (values.astype(np.float32), cell_of_shift, ends)
    return sp.csc_matrix(columns, shape=(n_cells, len(shifts))).tocsr()


def choose_null_genes(
    genes: np.ndarray, usable: np.ndarray, expression: np.ndarray, n_null: int
) -> dict[int, list[int]]:
    """Choose the null genes of each of `genes`: the `n_null` genes with the most similar expression.

    Null genes are chosen among the other genes of `usable`, the most similar one first. Genes are rows of
    the vocabulary. `expression` is `(genes of the vocabulary,)`.
    """
    null_genes = {}
    for gene in genes.tolist():
        others = usable[usable != gene]
        nearest = np.argsort(np.abs(expression[others] - expression[gene]), kind="stable")
        null_genes[gene] = others[nearest][:n_null].tolist()
    return null_genes


def _tabulate_genes(
    null_genes: dict[int, list[int]],
    shifts_by_gene: dict[int, tuple[np.ndarray, np.ndarray]],
    expression: np.ndarray,
    vocabulary: Vocabulary,
) -> pd.DataFrame:
    """Make var of the result, with a row for each key of `null_genes`."""
    mean_shifts = {
        gene: float(shifts.mean()) if len(shifts) else np.nan
        for gene, (_, shifts) in shifts_by_gene.items()
    }
    rows: list[dict[str, Any]] = []
    for gene, others in null_genes.items():
        about = {
            "symbol": vocabulary.symbols[gene],
            "n_cells": len(shifts_by_gene[gene][0]),
            "expression": expression[gene],
        }
        null = np.array([mean_shifts[other] for other in others])
        rows.append(about | _compare_with_null(mean_shifts[gene], null[np.isfinite(null)]))
    return pd.DataFrame(rows, index=[vocabulary.gene_ids[gene] for gene in null_genes])


def _compare_with_null(shift: float, null: np.ndarray) -> dict[str, float]:
    """Compare the `shift` of a gene with `null`, the shifts of its null genes: values by column of var."""
    compared = {"shift": shift, "null_mean": np.nan, "null_sd": np.nan, "z": np.nan, "p": 1.0}
    if len(null) and np.isfinite(shift):
        compared["null_mean"] = float(null.mean())
        compared["null_sd"] = float(null.std())
        if compared["null_sd"]:
            compared["z"] = (shift - compared["null_mean"]) / compared["null_sd"]
        compared["p"] = (1 + int((null >= shift).sum())) / (1 + len(null))
    return compared


def _scale_to_unit(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors, `(cells, width)`, to length 1: float64."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return vectors / np.maximum(lengths, np.finfo(np.float64).tiny)


def _find_named_genes(
    names: list[str], min_cells: int, vocabulary: Vocabulary, n_expressing: np.ndarray
) -> np.ndarray:
    """Find the rows of the genes `names` in the vocabulary, ascending.

    `n_expressing`, `(genes,)`, is the number of drawn cells that express each gene. Raises ConfigError for
    an unknown gene, and for a gene that fewer than `min_cells` drawn cells express.
    """
    rows = rows_of_known_genes(names, vocabulary, "knock_out.genes")
    for name, row in rows.items():
        if n_expressing[row] < min_cells:
            raise ConfigError(
                f"knock_out.genes: {name} has counts in {n_expressing[row]:,} of the drawn cells, knock_out.min_cells "
                f"is {min_cells:,}; leave it out, or lower knock_out.min_cells"
            )
    return np.unique([*rows.values()])
