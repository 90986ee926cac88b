"""Values with fractions: what they look like, and how estimated counts become whole numbers.

SoupX, CellBender, RSEM and the EM of STARsolo, alevin and kallisto write estimated counts, such as
3.72. Logarithms, normalised and imputed values have fractions too, and no rounding makes counts of
them. They show it:

    imputed        hardly a zero among the genes that the cells express, but values far below 1 or little variance
    logarithms     exp(x) - 1, or 2^x - 1, are multiples of one unit in each cell, or have one sum in all cells
    square roots   x^2, or the inverse of sqrt(x) + sqrt(x + 1) of Freeman and Tukey, are whole numbers
    normalised     the values are multiples of one unit in each cell, or have one sum in all cells

Counts that went through logarithms and back are whole numbers but for rounding errors, and their
squares too.

A stochastic draw keeps the expectation of every value and the sum of every cell. The fractions of a
cell are laid end to end, and a count is added wherever the line crosses k - u for a whole number k:
each value is rounded up with the probability of its fraction, and the sum of the cell differs by
less than 1. `u` and the order of the genes are hashes of seed, file, cell and gene, so the draw
does not depend on blocks, on the order of columns, or on the machine.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from cellmill.data.keys import hash_text, splitmix64

_CELLS = 200  # cells of a block that are looked at
_FEWEST = 5  # values of a cell; fewer show nothing
_FEWEST_COLUMNS = 20
_DENSE = 0.9  # share of nonzero values
_SMALL = 0.5
_MANY_SMALL = 0.1  # share of values below _SMALL, which a matrix of counts has as zeros
_FEW_NEGATIVE = 0.1  # share of values; MAGIC on principal components leaves a hundredth
_LEAST_DISPERSION = 0.5  # variance over mean of a gene, which is 1 or more for counts
_MOSTLY = 0.5
_MULTIPLE = 100.0  # largest multiple of a unit that is looked at: rounding errors grow with it
_TOLERANCE = 0.02
_CONSISTENT = 0.95  # share of a cell's values, and of the cells, that are multiples
_SQRT_MAX = 30.0  # largest root that is looked at: rounding errors of its square grow with it
_ONE_SUM = 1e-3  # relative difference
_ERROR = 1e-3  # distance of inexact counts from whole numbers
_RELATIVE_ERROR = 2e-6  # of large counts; a float32 has 24 bits
_LOG_MAX = 20.0  # 2^20 is a million, the sum of normalised values of a cell


class Looks(NamedTuple):
    """A kind of values with fractions."""

    text: str
    may_be_counts: bool


COUNTS = Looks("like estimated counts, as of RSEM, SoupX, CellBender or an EM algorithm", True)
IMPUTED = Looks("imputed: hardly a value is zero, as after MAGIC or scVI", False)
LOGARITHMS = Looks("log-transformed", False)
INEXACT = Looks("like counts with rounding errors, as of expm1(log1p(counts))", True)
SQUARE_ROOTS = Looks("like square roots of counts", False)
NORMALISED = Looks("normalised", False)
ONE_SUM = Looks("normalised: all cells have one sum", False)


def describe_fractions(matrix: sp.csr_matrix) -> Looks:
    """Kind of a block of cells with fractional values."""
    with_values = np.flatnonzero(np.diff(matrix.indptr))
    cells = matrix[with_values[:_CELLS]].astype(np.float64)
    cells.eliminate_zeros()
    values = cells.data
    is_fractional = values != np.floor(values)
    whole = np.rint(values)
    is_near = np.abs(values - whole) < np.maximum(_ERROR, _RELATIVE_ERROR * values)
    if whole.any() and is_near.all():
        return INEXACT
    if _are_square_roots(values[is_fractional]):
        return SQUARE_ROOTS
    if is_fractional.mean() <= _MOSTLY:
        return COUNTS
    if _is_imputed(cells):
        return IMPUTED
    if values.max() < _LOG_MAX:
        for exponential in (np.expm1, _exp2m1):
            linear = sp.csr_matrix(
                (exponential(values), cells.indices, cells.indptr), shape=cells.shape
            )
            if _has_units(linear) or _has_one_sum(linear):
                return LOGARITHMS
    if _has_one_sum(cells):
        return ONE_SUM
    if _has_units(cells):
        return NORMALISED
    return COUNTS


def describe_negatives(matrix: sp.csr_matrix) -> str:
    """Words for a block with negative values; centred genes are negative in about half of the
    cells.
    """
    cells = matrix[:_CELLS].astype(np.float64)
    n_expressed = len(np.unique(cells.indices))
    is_dense = n_expressed >= _FEWEST_COLUMNS and cells.nnz > _DENSE * n_expressed * cells.shape[0]
    few_negative = (cells.data < 0).mean() < _FEW_NEGATIVE
    return IMPUTED.text if is_dense and few_negative else "scaled"


def _is_imputed(cells: sp.csr_matrix) -> bool:
    genes = np.unique(cells.indices)
    n_cells = cells.shape[0]
    if len(genes) < _FEWEST_COLUMNS or n_cells < _FEWEST:
        return False
    if cells.nnz < _DENSE * len(genes) * n_cells:
        return False
    dense = cells[:, genes].toarray()
    dispersion = np.median(dense.var(axis=0) / dense.mean(axis=0))
    has_many_small = (cells.data < _SMALL).mean() > _MANY_SMALL
    return bool(has_many_small or dispersion < _LEAST_DISPERSION)


def _are_square_roots(values: np.ndarray) -> bool:
    roots = values[(values > 0) & (values < _SQRT_MAX)]
    if len(roots) < _FEWEST:
        return False
    squares = roots**2
    freeman_tukey = ((squares - 1) / (2 * roots)) ** 2
    return max(_share_of_whole(squares), _share_of_whole(freeman_tukey)) >= _CONSISTENT


def _exp2m1(values: np.ndarray) -> np.ndarray:
    return np.exp2(values) - 1


def _has_units(cells: sp.csr_matrix) -> bool:
    """True if the values of nearly every cell are multiples of its smallest value, or of a half or
    third of it.
    """
    shares = []
    for start, stop in pairwise(cells.indptr.tolist()):
        values = cells.data[start:stop]
        if len(values) < _FEWEST:
            continue
        multiples = values / values.min()
        multiples = multiples[multiples < _MULTIPLE]
        shares.append(max(_share_of_whole(multiples * parts) for parts in (1, 2, 3)))
    return bool(shares) and float(np.mean(np.array(shares) >= _CONSISTENT)) >= _CONSISTENT


def _share_of_whole(values: np.ndarray) -> float:
    return float((np.abs(values - np.rint(values)) < _TOLERANCE).mean())


def _has_one_sum(cells: sp.csr_matrix) -> bool:
    sums = np.asarray(cells.sum(axis=1)).ravel()
    sums = sums[sums > 0]
    return len(sums) > 1 and float(np.ptp(sums)) < _ONE_SUM * float(sums[0])


class StochasticRounding:
    """Keyed draw of whole numbers for the values of one file; `columns` are its genes."""

    def __init__(self, file: str, columns: Sequence[str], seed: int = 0):
        self._key = np.uint64(hash_text(file, seed))
        self._genes = np.array([hash_text(name) for name in columns], np.uint64)

    def round(self, matrix: sp.csr_matrix, first: int) -> np.ndarray:
        """Values of `matrix`, whose first row is row `first` of the file, rounded up or down;
        float64.
        """
        values = matrix.data.astype(np.float64)
        whole = np.floor(values)
        fractions = values - whole
        for row, (start, stop) in enumerate(pairwise(matrix.indptr.tolist()), first):
            genes = matrix.indices[start:stop]
            cell_key = splitmix64(np.array([self._key ^ np.uint64(row)], np.uint64))
            draws = splitmix64(self._genes.take(genes) ^ cell_key)
            order = np.lexsort((genes, draws))
            offset = float(splitmix64(cell_key)[0] >> np.uint64(11)) * 2.0**-53
            line = np.floor(np.cumsum(fractions[start:stop][order]) + offset)
            whole[start:stop][order] += np.diff(line, prepend=0.0)
        return whole
