"""Cells of full-length protocols, and counts without the effect of gene length.

These cells are found by their labels. Smart-seq and its kin read whole transcripts, so a gene of twice
the length has twice the reads. Droplet protocols count molecules, whose number does not depend on it.
In one corpus the two differ in ranks, medians and depth by gene length.
"""

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.corpus import Preprocess
from cellmill.data.arrays import MAX_COUNT, text_values
from cellmill.data.fractions import StochasticRounding
from cellmill.data.genes.tables import gene_lengths
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.rows import row_numbers
from cellmill.errors import DataError

_FULL_LENGTH = re.compile(
    r"smart[-_ ]?(?:like|seq[-_ ]?(?!3|[-_ ]?3|three))|smarter|fluidigm|ramda[-_ ]?seq|flash[-_ ]?seq|super[-_ ]?seq"
    r"|matq[-_ ]?seq|full[-_ ]?length|efo:(?:0008930|0008931|0700016|0010184|0008442|0010022)(?!\d)",
    re.IGNORECASE,
)
"""Names of full-length protocols, and their terms in the EFO. Smart-seq3 counts molecules."""
_MAX_LEVELS = 1000  # levels of an obs column that may name protocols
_SHOWN = 3


@dataclass(frozen=True)
class FullLengthCells:
    """Cells of full-length protocols in a file."""

    column: str  # obs column that names the protocol
    is_full_length: np.ndarray  # (cells,) bool
    by_name: dict[str, int]  # number of cells by protocol

    def __str__(self) -> str:
        n_cells = int(self.is_full_length.sum())
        n_all = len(self.is_full_length)
        names = ", ".join(f"{name!r} {count:,}" for name, count in [*self.by_name.items()][:_SHOWN])
        return (
            f"{n_cells:,} of {n_all:,} cells ({n_cells / n_all:.1%}) are of full-length protocols "
            f"(obs[{self.column!r}]: {names})"
        )


def find_full_length(obs: pd.DataFrame, keep: np.ndarray) -> FullLengthCells | None:
    """Find the cells of mask `keep` that a column of text assigns to a full-length protocol.

    None if there are none.
    """
    best = None
    for name in map(str, obs.columns):
        column = obs[name]
        if isinstance(column, pd.DataFrame) or pd.api.types.is_numeric_dtype(column.dtype):
            continue
        codes, levels = pd.factorize(column)
        if len(levels) > _MAX_LEVELS:
            continue
        texts = text_values(pd.Series(levels))
        matches = [_FULL_LENGTH.search(text) is not None for text in texts]
        mask = np.array([*matches, False], bool)[codes] & keep  # the code of a missing value is -1
        if mask.any() and (best is None or mask.sum() > best.is_full_length.sum()):
            counts = pd.Series(texts[codes[mask]]).value_counts()
            best = FullLengthCells(name, mask, {str(text): int(n) for text, n in counts.items()})
    return best


class LengthNormalisation:
    """Divides counts of full-length cells by gene lengths.

    The sum of a cell stays, and whole numbers are drawn.
    """

    def __init__(
        self, reader: CountsReader, cells: np.ndarray, gene_ids: list[str], organism: str | None
    ):
        """Genes of unknown length count as of median length."""
        table = {} if organism is None else gene_lengths(organism)
        lengths = np.array([table.get(gene, np.nan) for gene in gene_ids], np.float64)
        known = lengths[np.isfinite(lengths)]
        if not len(known):
            raise DataError(
                f"{reader.path}: preprocess.gene_length normalise requires genes of known length, and none has one; "
                "set preprocess.organism, or gene_length to keep"
            )
        self._cells = cells
        self._factors = 1 / np.where(np.isfinite(lengths), lengths, np.median(known))
        self._draw = StochasticRounding(f"{reader.path.name}|gene_length", gene_ids)

    def apply(self, block: sp.csr_matrix, first: int) -> sp.csr_matrix:
        """Normalise the counts of full-length cells of a block, whose first row is row `first` of the file."""
        chosen = self._cells[first : first + block.shape[0]]
        if not chosen.any():
            return block
        rows = row_numbers(block.indptr)
        counts = block.data.astype(np.float64)
        scaled = counts * self._factors.take(block.indices)
        totals = np.bincount(rows, counts, block.shape[0])
        scaled_totals = np.bincount(rows, scaled, block.shape[0])
        scaled *= (totals / np.where(scaled_totals > 0, scaled_totals, 1))[rows]
        values = np.where(chosen[rows], scaled, counts)
        matrix = sp.csr_matrix((values, block.indices, block.indptr), block.shape)
        drawn = np.minimum(self._draw.round(matrix, first), MAX_COUNT).astype(block.data.dtype)
        normalised = sp.csr_matrix((drawn, block.indices.copy(), block.indptr.copy()), block.shape)
        normalised.eliminate_zeros()
        return normalised


def check_protocols(
    reader: CountsReader, options: Preprocess, keep: np.ndarray
) -> FullLengthCells | None:
    """Find cells of full-length protocols.

    Raises DataError if `preprocess.gene_length` refuses them.
    """
    cells = find_full_length(reader.obs, keep)
    if cells is not None and options.gene_length == "refuse":
        raise DataError(
            f"{reader.path}: {cells}, which preprocess.gene_length refuses; filter them out, or set it to normalise"
        )
    return cells
