"""Rows of a file that are parts of genes, summed by gene.

They are probes of 10x Flex, or spliced and unspliced counts of alevin-fry. A probe that 10x excludes
(`filtered_probes` is false) is dropped, the others are summed by `gene_id`, or by the Ensembl id in
names such as `ENSG00000141510|TP53|2f1b3c`. alevin-fry's USA mode has three columns a gene, `x`, `x-U`
and `x-A`: X is spliced + ambiguous, as its own tools load single-cell data, and `counts` chooses among
MODES.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.datasets import COUNTS
from cellmill.data.arrays import text_values
from cellmill.data.inputs.matrices import StoredMatrix
from cellmill.data.inputs.source import CountSource
from cellmill.data.rows import row_offsets

MODES = ("S", "U", "A", "S+A", "S+U+A")
"""Values of `counts` for a matrix with spliced (S), unspliced (U) and ambiguous (A) columns."""
_ENDS = {"U": "-U", "A": "-A"}
_FILTERED = "filtered_probes"
_IN_NAME = re.compile(r"(?:^|\|)(ENS[A-Z]*G\d{11}(?:\.\d+)?)\|")
_TRUE = ("true", "t", "1", "yes")


class GroupedColumns(StoredMatrix):
    """Columns of a matrix, summed by `target`, int, their new column; those with -1 are dropped."""

    def __init__(self, whole: StoredMatrix, target: np.ndarray, n_vars: int):
        self._whole = whole
        self._target = target.astype(np.int32)
        self.shape = (whole.shape[0], n_vars)

    @property
    def is_by_cell(self) -> bool:
        return self._whole.is_by_cell

    def parts_from(self, start: int, block: int) -> Iterator[sp.csr_matrix]:
        for part in self._whole.blocks(block, start):
            columns = self._target[part.indices]
            is_kept = columns >= 0
            offsets = row_offsets(is_kept)[part.indptr]
            shape = (part.shape[0], self.shape[1])
            grouped = sp.csr_matrix((part.data[is_kept], columns[is_kept], offsets), shape=shape)
            if grouped.dtype.kind == "f":  # fractions that sum to a count are one
                grouped = grouped.astype(np.float64)
                grouped.sum_duplicates()
            yield grouped

    def close(self) -> None:
        self._whole.close()


def group_probes(source: CountSource) -> CountSource:
    """Sum probes into genes, with a note that says how many; an input whose rows are genes stays."""
    var = source.var
    n_probes = len(var)
    is_kept = np.ones(n_probes, dtype=bool)
    if _FILTERED in var:
        values = var[_FILTERED]
        if values.dtype == bool:
            is_kept = values.to_numpy()
        else:
            is_kept = np.array(
                [text.strip().lower() in _TRUE for text in text_values(values)], bool
            )
    genes = _genes_of_probes(var)
    is_renamed = genes is not None
    if genes is None:
        if is_kept.all():
            return source
        genes = var.index.to_numpy(dtype=object)
        by = "their names"
    elif _FILTERED in var and "gene_id" in var:
        by = "gene_id"
    else:
        by = "the Ensembl id in their names"
    codes, names = pd.factorize(genes[is_kept])
    target = np.full(n_probes, -1)
    target[is_kept] = codes
    first = np.flatnonzero(is_kept)[np.unique(codes, return_index=True)[1]]
    rows = var.iloc[first].set_axis(pd.Index(names, dtype=object), axis=0)
    if "gene_name" in rows:
        rows = rows.assign(symbol=rows["gene_name"])
    rows = rows.drop(columns=[_FILTERED, "gene_id", "gene_name"], errors="ignore")
    n_kept = int(is_kept.sum())
    changes = []
    others = ""
    if _FILTERED in var:
        excluded = f"{n_probes - n_kept:,} of {n_probes:,} probes are excluded"
        changes.append(f"{excluded} ({_FILTERED} is false)")
        others = "the other "
    if len(names) < n_kept:
        changes.append(f"{others}{n_kept:,} probes are summed into {len(names):,} genes by {by}")
    elif is_renamed:
        changes.append(f"{others}rows are named by {by}")
    matrix = GroupedColumns(source.matrix, target, len(names))
    return replace(source, matrix=matrix, var=rows, notes=[*source.notes, ", ".join(changes)])


def _genes_of_probes(var: pd.DataFrame) -> np.ndarray | None:
    """Find the gene of each row, if rows are probes.

    It is in column `gene_id` next to `filtered_probes`, or is the id within the name.
    """
    if _FILTERED in var and "gene_id" in var:
        return text_values(var["gene_id"])
    if not len(var) or "|" not in str(var.index[0]) + str(var.index[-1]):
        return None
    names = [str(name) for name in var.index]
    genes = []
    n_ids = 0
    for name in names:
        match = _IN_NAME.search(name)
        genes.append(match[1] if match else name)
        n_ids += match is not None
    return np.array(genes, dtype=object) if 2 * n_ids > len(names) else None


def is_split(names: pd.Index) -> bool:
    """True if every gene has the three names of USA mode: its own, and with -U and -A."""
    known = set(map(str, names))
    split = {stem + end for stem, end in product(_stems(known), ("", *_ENDS.values()))}
    return bool(split) and split == known and len(known) == len(names)


def _stems(names: Iterable[str]) -> set[str]:
    """Names of genes that have unspliced counts."""
    end = _ENDS["U"]
    return {name.removesuffix(end) for name in names if name.endswith(end)}


def choose_mode(source: CountSource, counts: str) -> CountSource:
    """Sum the columns of `counts` (X or one of MODES) by gene; an input without USA mode stays."""
    if not is_split(source.var.index):
        return source
    mode = counts if counts in MODES else "S+A"
    letters = mode.split("+")
    names = list(map(str, source.var.index))
    stems = _stems(names)
    genes = [column for column, name in enumerate(names) if name in stems]
    row_of_column = {}  # row of the gene by the name of each column to sum
    for row, column in enumerate(genes):
        for letter in letters:
            row_of_column[names[column] + _ENDS.get(letter, "")] = row
    target = np.array([row_of_column.get(name, -1) for name in names])
    parts = {"S": "spliced", "U": "unspliced", "A": "ambiguous"}
    summed = " + ".join(parts[letter] for letter in letters)
    others = [other for other in MODES if other != mode]
    note = (
        f"three columns a gene (USA mode of alevin-fry): {mode} is read, {summed}; set {COUNTS} to "
        f"{' or '.join(others)} for others"
    )
    return replace(
        source,
        counts=counts,
        matrix=GroupedColumns(source.matrix, target, len(genes)),
        var=source.var.iloc[genes],
        others=[*source.others, *others],
        notes=[*source.notes, note],
    )
