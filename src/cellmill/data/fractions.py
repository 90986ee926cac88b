"""Values with fractions: what they look like, and how estimated counts become whole numbers.

SoupX, CellBender, RSEM and the EM of STARsolo, alevin and kallisto write estimated counts, such as
3.72. Logarithms, normalised and imputed values have fractions too, and rounding does not turn them
into counts. They are recognised so:

    imputed        hardly a zero among the genes that the cells express, but values far below 1 or little variance
    logarithms     exp(x) - 1, or 2^x - 1, are multiples of one unit in each cell, or have one sum in all cells
    square roots   x^2, or the inverse of sqrt(x) + sqrt(x + 1) of Freeman and Tukey, are whole numbers
    normalised     the values are multiples of one unit in each cell, or have one sum in all cells

Counts that went through logarithms and back are whole numbers with rounding errors. Their squares are
nearly whole too, so they are looked for before square roots.

Estimated counts are rounded by a stochastic draw, which keeps the expectation of every value and the
sum of every cell. The fractions of a cell are laid end to end on a line, and a count is added wherever
the line crosses k - u, for a whole number k. So each value is rounded up with the probability of its
fraction, and the sum of the cell changes by less than 1. `u` and the order of the genes are hashes of
seed, file, cell and gene. So the draw does not depend on blocks, on the order of columns, or on the
machine.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from cellmill.data.keys import hash_text, splitmix64

_MAX_CELLS = 200  # cells of a block that are looked at
_MIN_VALUES = 5  # values needed to judge a cell
_MIN_COLUMNS = 20  # expressed genes needed to judge a block
_DENSE_FRAC = 0.9  # imputed: at least this fraction of the values are not zero
_SMALL = 0.5
_MANY_SMALL_FRAC = 0.1  # imputed: more of the values are below `_SMALL`, where counts are zero
_FEW_NEGATIVE_FRAC = 0.1  # imputed: fewer values are negative; MAGIC on components leaves 0.01
_MIN_DISPERSION = 0.5  # imputed: a gene's variance over mean is less; for counts it is 1 or more
_FEW_FRACTIONAL_FRAC = 0.5  # counts: at most this fraction of the values have fractions
_MAX_MULTIPLE = 100.0  # larger multiples of a unit are not looked at, since rounding errors grow
_TOLERANCE = 0.02  # largest distance of a multiple from a whole number
_CONSISTENT_FRAC = 0.95  # fraction of a cell's values, and of the cells, that must be multiples
_MAX_ROOT = 30.0  # larger roots are not looked at, since rounding errors of squares grow
_MAX_SUM_DIFFERENCE = 1e-3  # relative difference of sums that count as one
_MAX_ERROR = 1e-3  # largest distance of an inexact count from a whole number
_MAX_RELATIVE_ERROR = 2e-6  # the same for large counts, relative; a float32 has 24 bits
_MAX_LOG = 20.0  # 2^20 is a million, the sum of normalised values of a cell


class Looks(NamedTuple):
    """What values with fractions look like."""

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
    """Find what a block of cells with fractional values looks like."""
    with_values = np.flatnonzero(np.diff(matrix.indptr))
    cells = matrix[with_values[:_MAX_CELLS]].astype(np.float64)
    cells.eliminate_zeros()
    values = cells.data
    is_fractional = values != np.floor(values)
    whole = np.rint(values)
    is_near = np.abs(values - whole) < np.maximum(_MAX_ERROR, _MAX_RELATIVE_ERROR * values)
    if whole.any() and is_near.all():
        return INEXACT
    if _are_square_roots(values[is_fractional]):
        return SQUARE_ROOTS
    if is_fractional.mean() <= _FEW_FRACTIONAL_FRAC:
        return COUNTS
    if _is_imputed(cells):
        return IMPUTED
    if _has_one_sum(cells):
        return ONE_SUM
    # before logarithms: exp(x) - 1 of small values is nearly x
    if values.max() <= _SMALL and _has_units(cells):
        return NORMALISED
    if values.max() < _MAX_LOG:
        for exponential in (np.expm1, _exp2m1):
            linear = sp.csr_matrix(
                (exponential(values), cells.indices, cells.indptr), shape=cells.shape
            )
            if _has_units(linear) or _has_one_sum(linear):
                return LOGARITHMS
    if _has_units(cells):
        return NORMALISED
    return COUNTS


def describe_negatives(matrix: sp.csr_matrix) -> str:
    """Say what a block with negative values looks like: imputed or scaled.

    Centred genes are negative in about half of the cells, imputed genes in few.
    """
    cells = matrix[:_MAX_CELLS].astype(np.float64)
    n_expressed = len(np.unique(cells.indices))
    is_dense = (
        n_expressed >= _MIN_COLUMNS and cells.nnz > _DENSE_FRAC * n_expressed * cells.shape[0]
    )
    has_few_negative = (cells.data < 0).mean() < _FEW_NEGATIVE_FRAC
    return IMPUTED.text if is_dense and has_few_negative else "scaled"


def _is_imputed(cells: sp.csr_matrix) -> bool:
    genes = np.unique(cells.indices)
    n_cells = cells.shape[0]
    if len(genes) < _MIN_COLUMNS or n_cells < _MIN_VALUES:
        return False
    if cells.nnz < _DENSE_FRAC * len(genes) * n_cells:
        return False
    dense = cells[:, genes].toarray()
    dispersion = np.median(dense.var(axis=0) / dense.mean(axis=0))
    has_many_small = (cells.data < _SMALL).mean() > _MANY_SMALL_FRAC
    return bool(has_many_small or dispersion < _MIN_DISPERSION)


def _are_square_roots(values: np.ndarray) -> bool:
    roots = values[(values > 0) & (values < _MAX_ROOT)]
    if len(roots) < _MIN_VALUES or roots.min() < _SMALL:  # the root of a count is at least 1
        return False
    squares = roots**2
    freeman_tukey = ((squares - 1) / (2 * roots)) ** 2
    return max(_whole_frac(squares), _whole_frac(freeman_tukey)) >= _CONSISTENT_FRAC


def _exp2m1(values: np.ndarray) -> np.ndarray:
    return np.exp2(values) - 1


def _has_units(cells: sp.csr_matrix) -> bool:
    """Return True if the values of nearly every cell are multiples of one unit.

    The unit is the cell's smallest value, or a half or a third of it.
    """
    whole_fracs = []
    for start, stop in pairwise(cells.indptr.tolist()):
        values = cells.data[start:stop]
        if len(values) < _MIN_VALUES:
            continue
        multiples = values / values.min()
        multiples = multiples[multiples < _MAX_MULTIPLE]
        whole_fracs.append(max(_whole_frac(multiples * divisor) for divisor in (1, 2, 3)))
    is_consistent = np.array(whole_fracs) >= _CONSISTENT_FRAC
    return bool(whole_fracs) and float(np.mean(is_consistent)) >= _CONSISTENT_FRAC


def _whole_frac(values: np.ndarray) -> float:
    """Return the fraction of the values that are nearly whole numbers."""
    return float((np.abs(values - np.rint(values)) < _TOLERANCE).mean())


def _has_one_sum(cells: sp.csr_matrix) -> bool:
    """Return True if the values of every cell have nearly the same sum."""
    sums = np.asarray(cells.sum(axis=1)).ravel()
    sums = sums[sums > 0]
    return len(sums) > 1 and float(np.ptp(sums)) < _MAX_SUM_DIFFERENCE * float(sums[0])


class StochasticRounding:
    """Rounds the values of one file, whose genes are `columns`, to whole numbers by a keyed draw."""

    def __init__(self, file: str, columns: Sequence[str], seed: int = 0):
        self._key = np.uint64(hash_text(file, seed))
        self._genes = np.array([hash_text(name) for name in columns], np.uint64)

    def round(self, matrix: sp.csr_matrix, first: int) -> np.ndarray:
        """Round the values of `matrix`, whose first row is row `first` of the file; float64."""
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
