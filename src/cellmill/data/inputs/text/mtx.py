"""Matrix Market: a file, or a folder of files, with text tables of genes and cells beside it.

Any `.mtx` or `.mtx.gz` is read, cells in columns or in rows (`companions.py`); a `.txt` too
if it begins as one. Drop-seq's tools may write the names into the comments of the header. The text is
read once, in pieces, into a temporary file in order of cells; it is never whole in memory. `var`
has every text column of the genes' table.

In a folder of several matrices X is the one called `matrix.mtx`; with kb-python's `mature`,
`nascent` and `ambiguous` it is their sum, as in the file that kb-python itself writes with --h5ad.
`counts` chooses another one by name.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.datasets import COUNTS
from cellmill.data.inputs.h5 import open_bytes, reading
from cellmill.data.inputs.matrices import MAX_LENGTH, Pieces, StoredMatrix
from cellmill.data.inputs.source import CountSource, Format, mark_missing, require_matrix
from cellmill.data.inputs.text import lines
from cellmill.data.inputs.text.companions import (
    Companions,
    find_companions,
    is_matrix,
    matrix_stem,
)
from cellmill.data.inputs.text.tables import cell_frame, gene_frame, is_table
from cellmill.errors import DataError

_FIELDS = {
    "integer": np.int32,
    "unsigned-integer": np.int32,  # scipy's name for uint32 and uint64
    "real": np.float64,
    "float": np.float64,
    "double": np.float64,
}
_MARK = b"%%MatrixMarket"
_LINE = 1 << 20  # bytes; longest line of a header
# how Drop-seq's tools begin header lines with names of rows, and of columns
_ROW_NAMES = (b"%%GENES", b"%%ROWS")
_COLUMN_NAMES = (b"%%CELL_BARCODES", b"%%COLS")
_MISSING = 1e308  # what writeMM of R's package Matrix writes for NA, NaN and Inf
_PARTS = ("mature", "nascent", "ambiguous")
_SUMS = {
    "X": _PARTS,
    "total": _PARTS,
    "cell": ("mature", "ambiguous"),
    "nucleus": ("nascent", "ambiguous"),
}
"""Matrices of kb-python by the names of its option --sum."""


def _open_mtx(path: Path, file: Any, counts: str) -> CountSource:
    """Open a folder, or the matrix file of one."""
    if path.is_dir():
        matrices = _matrices_in(path)
        option = COUNTS
    else:
        matrices = {"X": [path]}
        option = "the path to that file"
    if counts not in matrices and "X" not in matrices:
        listed = ", ".join(file.name for file in _files_in(path))
        raise DataError(
            f"{path}: has {len(matrices)} matrices ({listed}); name one of the files instead of the folder, or set "
            f"{COUNTS} to {' or '.join(sorted(matrices))}"
        )
    require_matrix(path, counts, sorted(matrices))
    files = matrices.pop(counts)
    others = list(matrices)
    if not path.is_dir():
        others = [file.name for file in _files_in(path.parent) if _is_main(file) and file != path]
    notes = []
    if len(files) > 1:
        summed = " + ".join(map(_last_word, files))
        notes.append(
            f"{counts} is {summed}; set {COUNTS} to another one: {', '.join(sorted(others))}"
        )
    parts = [MtxMatrix(file) for file in files]
    shapes = {part.stored_shape for part in parts}
    if len(shapes) > 1:
        raise DataError(
            f"{path}: expected matrices of one shape, got {' and '.join(map(str, sorted(shapes)))}"
        )
    names = parts[0].named_in_header() or find_companions(files[0], *parts[0].stored_shape)
    for part in parts:
        part.orient(names.cells_in_rows)
    var, sentence = gene_frame(names.genes, names.more_genes)
    if sentence is not None:
        notes.append(f"{names.gene_file.name}: {sentence}")
    notes += names.notes
    obs, written, missing = mark_missing(names.obs)
    notes += missing
    source = CountSource(
        path,
        counts,
        parts[0] if len(parts) == 1 else _SummedMatrix(parts),
        obs,
        var,
        others,
        notes=notes,
        written=written,
    )
    if others:
        source.option = option
    return source


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if is_matrix(file) and not file.is_dir())


def _is_matrix_market(path: Path) -> bool:
    """True for a file named as one, and for a text table that begins as one."""
    if is_matrix(path) or not is_table(path) or not path.is_file():
        return is_matrix(path)
    with open_bytes(path) as text, reading(path):
        return text.read(len(_MARK)) == _MARK


def _is_main(file: Path) -> bool:
    return matrix_stem(file).lower().endswith("matrix")


def _last_word(file: Path) -> str:
    return matrix_stem(file).rpartition(".")[2]


def _matrices_in(folder: Path) -> dict[str, list[Path]]:
    """Files of each matrix of a folder by the value of `counts`."""
    files = _files_in(folder)
    if len(files) == 1:
        return {"X": files}
    matrices = {_last_word(file): [file] for file in files}
    if len(matrices) < len(files):  # matrix.mtx and matrix.mtx.gz, or samples that end alike
        matrices = {file.name: [file] for file in files}
    main = [file for file in files if _is_main(file)]
    if len(main) == 1:
        others = {name: files for name, files in matrices.items() if files != main}
        return {"X": main} | others
    if {*_PARTS} <= {*matrices}:
        sums = {}
        for name, parts in _SUMS.items():
            sums[name] = [matrices[part][0] for part in parts]
        return sums | matrices
    return matrices


class MtxMatrix(StoredMatrix):
    """Coordinates in a text file, sorted by cell on disk; `stored_shape` is that of the file."""

    def __init__(self, path: Path):
        self._path = path
        self._cells_in_rows = False
        self._row_names: list[str] = []
        self._column_names: list[str] = []
        with open_bytes(path) as text:
            self._dtype, self.stored_shape, self._n_values = self._header(text)

    def orient(self, cells_in_rows: bool) -> None:
        """Set which numbers of a line count cells."""
        self._cells_in_rows = cells_in_rows
        self.shape = self.stored_shape if cells_in_rows else self.stored_shape[::-1]

    def _header(self, text: IO[bytes]) -> tuple[type, tuple[int, int], int]:
        """dtype, shape and number of the values; leaves `text` at the first of them."""
        with reading(self._path):
            first = text.readline(_LINE).decode("utf-8", "replace").lower().split()
            field = first[3] if len(first) > 3 else ""
            wanted = ["%%matrixmarket", "matrix", "coordinate", field, "general"]
            if field not in _FIELDS or first != wanted:
                raise DataError(f"{self._path}: {_explain_header(first)}")
            line = b"%"
            self._row_names.clear()
            self._column_names.clear()
            while line.startswith(b"%") or (line and not line.strip()):
                line = text.readline(_LINE)
                self._add_names(line)
            words = line.split()
            sizes = [int(word) for word in words]
        if len(sizes) != 3 or min(sizes) < 0 or max(sizes[:2]) > MAX_LENGTH:
            raise DataError(
                f"{self._path}: damaged: expected a line of rows, columns and values, got {line[:80]!r}"
            )
        return _FIELDS[field], (sizes[0], sizes[1]), sizes[2]

    def _add_names(self, line: bytes) -> None:
        """Keep the names in a line of the header, if it has any."""
        mark = line.split(b"\t", 1)[0].strip()
        if mark in _ROW_NAMES + _COLUMN_NAMES:
            kept = self._row_names if mark in _ROW_NAMES else self._column_names
            kept += line.decode("utf-8").rstrip("\r\n").split("\t")[1:]

    def named_in_header(self) -> Companions | None:
        """Genes of the rows and cells of the columns, if the header names all of them."""
        if (len(self._row_names), len(self._column_names)) != self.stored_shape:
            return None
        genes = pd.DataFrame({0: self._row_names}, dtype=object)
        cells = pd.DataFrame({0: self._column_names}, dtype=object)
        return Companions(genes, [], cell_frame(cells), False, self._path)

    def pieces(self) -> Pieces:
        n_values = 0
        with open_bytes(self._path) as text:
            self._header(text)
            triples = lines.read_triples(
                self._path, text, self._dtype, self.stored_shape, self._n_values
            )
            for row, column, values in triples:
                if values.dtype.kind == "f" and len(values) and values.max() >= _MISSING:
                    raise DataError(
                        f"{self._path}: has the value 1e308, which R's writeMM writes for NA, NaN and Inf; set these "
                        "to 0 in R and write the matrix again"
                    )
                yield (row, column, values) if self._cells_in_rows else (column, row, values)
                n_values += len(values)
        if n_values != self._n_values:
            raise DataError(
                f"{self._path}: truncated or damaged: {n_values:,} values of {self._n_values:,}; copy it again"
            )


class _SummedMatrix(StoredMatrix):
    """Sum of matrices of the same cells and genes."""

    def __init__(self, matrices: list[MtxMatrix]):
        self._matrices = matrices
        self.shape = matrices[0].shape

    @property
    def is_by_cell(self) -> bool:
        return False

    def parts(self, block: int) -> Iterator[sp.csr_matrix]:
        for parts in zip(*(matrix.blocks(block) for matrix in self._matrices)):
            yield sum(parts[1:], start=parts[0])

    def close(self) -> None:
        for matrix in self._matrices:
            matrix.close()


def _explain_header(first: list[str]) -> str:
    got = " ".join(first)[:80]
    wanted = "expected '%%MatrixMarket matrix coordinate integer general' (or real)"
    reasons = {
        "array": "a dense array; write it sparse (HTSeq: --counts-output-sparse; scipy: mmwrite of a coo_matrix)",
        "pattern": "a pattern without values, which has no counts",
        "complex": "complex numbers",
        "symmetric": "a symmetric matrix, which has no cells",
    }
    for word, reason in reasons.items():
        if word in first:
            return f"{wanted}, got {got!r}: {reason}"
    return f"{wanted}, got {got!r}"


FORMAT = Format(
    "Matrix Market (.mtx, .mtx.gz or their folder)",
    lambda path, file: bool(_files_in(path)) if path.is_dir() else _is_matrix_market(path),
    _open_mtx,
)
