"""Matrix Market folders, as Cell Ranger, STARsolo, alevin and GEO have them, cells in columns:

    [PREFIX]matrix.mtx[.gz]  [PREFIX]features.tsv[.gz] or genes.tsv[.gz]  [PREFIX]barcodes.tsv[.gz]

The text is read once, in pieces, into a temporary file sorted by cell; it is never whole in memory. Genes are named by
the first column of features.tsv, their id; `var` has `symbol` and `feature_types`, the second and third.
"""

import gzip
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.inputs.matrices import MAX_LENGTH, RowBuckets
from cellmill.data.inputs.source import CountSource, reading
from cellmill.errors import ConfigError, DataError

MATRIX = ("matrix.mtx", "matrix.mtx.gz")
_PIECE = 1 << 21  # lines in memory at once
_FIELDS = {"integer": np.int64, "real": np.float64}
_LINE = 1 << 16  # bytes; longest line of a header


def is_mtx(path: Path) -> bool:
    """True for a matrix.mtx[.gz], and for a folder with one."""
    return path.name.endswith(MATRIX) or (path.is_dir() and bool(_matrices_in(path)))


def open_mtx(path: Path, counts: str) -> CountSource:
    """Open a folder, or the matrix file of one."""
    if counts != "X":
        raise ConfigError(
            f"{path}: a Matrix Market folder has no matrix {counts!r}; leave the dataset's `counts` empty"
        )
    file = _matrix_file(path)
    prefix = file.name.removesuffix(".gz").removesuffix("matrix.mtx")
    genes = _table(file.parent, prefix, ("features", "genes"))
    cells = _table(file.parent, prefix, ("barcodes",))
    names = [row[0] for row in genes]
    var = pd.DataFrame(index=pd.Index(names, dtype=object))
    for column, name in ((1, "symbol"), (2, "feature_types")):
        if all(len(row) > column for row in genes) and genes:
            var[name] = [row[column] for row in genes]
    obs = pd.DataFrame(index=pd.Index([row[0] for row in cells], dtype=object))
    return CountSource(path, counts, MtxMatrix(file, len(cells), len(genes)), obs, var)


class MtxMatrix:
    """Coordinates in a text file, genes x cells; sorted by cell through a temporary file when it is first read."""

    def __init__(self, path: Path, n_obs: int, n_vars: int):
        self._path, self.shape = path, (n_obs, n_vars)
        self._sorted: RowBuckets | None = None
        with _text(path) as text:
            self._dtype, self._n_values = self._header(text)

    def blocks(self, block: int) -> Iterator[sp.csr_matrix]:
        """As `StoredMatrix.blocks`."""
        if self._sorted is None:
            self._sorted = self._sort()
        return self._sorted.blocks(block)

    def close(self) -> None:
        """Drop the temporary file."""
        if self._sorted is not None:
            self._sorted.close()

    def _header(self, text: IO[bytes]) -> tuple[type, int]:
        """dtype and number of the values; leaves `text` at the first of them."""
        with reading(self._path):
            first = text.readline(_LINE).decode("utf-8", "replace").lower().split()
            if first[:3] != ["%%matrixmarket", "matrix", "coordinate"] or first[3:] not in (
                ["integer", "general"],
                ["real", "general"],
            ):
                got = " ".join(first)[:80]
                raise DataError(
                    f"{self._path}: expected '%%MatrixMarket matrix coordinate integer general' (or real), got {got!r}"
                )
            line = b"%"
            while line.startswith(b"%") or line == b"\n":
                line = text.readline(_LINE)
            sizes = [int(word) for word in line.split()]
        if len(sizes) != 3 or min(sizes) < 0:
            raise DataError(f"{self._path}: damaged: expected a line of genes, cells and values, got {line[:80]!r}")
        if (sizes[1], sizes[0]) != self.shape:
            wrong = "it is cells x genes: transpose it" if tuple(sizes[:2]) == self.shape else "is it of other files?"
            n_obs, n_vars = self.shape
            raise DataError(
                f"{self._path}: expected {n_vars:,} genes x {n_obs:,} cells, as the names beside it, got "
                f"{sizes[0]:,} x {sizes[1]:,}; {wrong}"
            )
        return _FIELDS[first[3]], sizes[2]

    def _sort(self) -> RowBuckets:
        buckets, n_values = RowBuckets(self.shape, np.dtype(self._dtype)), 0
        try:
            for piece in self._pieces():
                genes, cells = (self._positions(piece[name].to_numpy(), size) for name, size in self._sides())
                buckets.add(cells, genes, piece["value"].to_numpy())
                n_values += len(piece)
            if n_values != self._n_values:
                raise DataError(
                    f"{self._path}: truncated or damaged: {n_values:,} values of {self._n_values:,}; copy it again"
                )
        except BaseException:
            buckets.close()
            raise
        return buckets

    def _sides(self) -> tuple[tuple[str, int], ...]:
        return ("gene", self.shape[1]), ("cell", self.shape[0])

    def _positions(self, numbers: np.ndarray, size: int) -> np.ndarray:
        if len(numbers) and (int(numbers.min()) < 1 or int(numbers.max()) > size):
            raise DataError(f"{self._path}: damaged: an index is outside 1 to {size:,}")
        return numbers - 1

    def _pieces(self) -> Iterator[pd.DataFrame]:
        types = {"gene": np.int64, "cell": np.int64, "value": self._dtype}
        if not self._n_values:  # pandas has an error for it
            return
        with _text(self._path) as text:
            self._header(text)
            with reading(self._path), warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)  # more than three columns
                reader = pd.read_csv(
                    text, sep=r"\s+", header=None, names=list(types), dtype=types, index_col=False,
                    na_values=[], keep_default_na=False, chunksize=_PIECE,
                )  # fmt: skip
            while True:
                with reading(self._path), warnings.catch_warnings():
                    warnings.simplefilter("error", pd.errors.ParserWarning)
                    piece = next(reader, None)
                if piece is None:
                    return
                yield piece


def _matrices_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name.endswith(MATRIX) and not file.name.startswith("."))


def _matrix_file(path: Path) -> Path:
    files = _matrices_in(path) if path.is_dir() else [path]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise DataError(f"{path}: has {len(files)} matrices ({names}); name one of the files instead of the folder")
    return files[0]


def _table(folder: Path, prefix: str, names: tuple[str, ...]) -> list[list[str]]:
    """Rows of the first table of `names` that is there, plain or gzip."""
    candidates = [folder / f"{prefix}{name}.tsv{end}" for name in names for end in ("", ".gz")]
    file = next((file for file in candidates if file.exists()), None)
    if file is None:
        raise DataError(f"{folder}: no {prefix}{names[0]}.tsv; expected it beside {prefix}matrix.mtx, plain or as .gz")
    with _text(file) as lines, reading(file):
        rows = [line.decode().rstrip("\r\n").split("\t") for line in lines]
    if len(rows) > MAX_LENGTH:
        raise DataError(f"{file}: has {len(rows):,} lines; the limit is {MAX_LENGTH:,}")
    return rows


def _text(path: Path) -> IO[bytes]:
    if not path.is_file():
        raise DataError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]
