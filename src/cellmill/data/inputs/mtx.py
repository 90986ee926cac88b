"""Matrix Market folders, as Cell Ranger, STARsolo, alevin and GEO have them, cells in columns:

    [PREFIX]matrix.mtx[.gz]  [PREFIX]features.tsv[.gz] or genes.tsv[.gz]  [PREFIX]barcodes.tsv[.gz]

The text is read once, in pieces, into a temporary file sorted by cell; it is never whole in memory. Genes are named by
the first column of features.tsv, their id; `var` has `symbol` and `feature_types`, the second and third.
"""

import warnings
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

from cellmill.data.inputs.h5 import open_bytes, reading
from cellmill.data.inputs.matrices import MAX_LENGTH, Pieces, StoredMatrix
from cellmill.data.inputs.source import CountSource, Format, require_matrix
from cellmill.errors import DataError

_MATRIX = ("matrix.mtx", "matrix.mtx.gz")
_PIECE = 1 << 21  # lines in memory at once
_FIELDS = {"integer": np.int64, "real": np.float64}
_LINE = 1 << 16  # bytes; longest line of a header


def _open_mtx(path: Path, file: Any, counts: str) -> CountSource:
    """Open a folder, or the matrix file of one."""
    require_matrix(path, counts, ["X"])
    files = _matrices_in(path) if path.is_dir() else [path]
    if len(files) > 1:
        found = ", ".join(file.name for file in files)
        raise DataError(f"{path}: has {len(files)} matrices ({found}); name one of the files instead of the folder")
    prefix = files[0].name.removesuffix(".gz").removesuffix("matrix.mtx")
    genes = _table(files[0].parent, prefix, ("features", "genes"))
    cells = _table(files[0].parent, prefix, ("barcodes",))
    var = pd.DataFrame(index=pd.Index([row[0] for row in genes], dtype=object))
    for column, name in ((1, "symbol"), (2, "feature_types")):
        if all(len(row) > column for row in genes) and genes:
            var[name] = [row[column] for row in genes]
    obs = pd.DataFrame(index=pd.Index([row[0] for row in cells], dtype=object))
    return CountSource(path, counts, MtxMatrix(files[0], len(cells), len(genes)), obs, var)


class MtxMatrix(StoredMatrix):
    """Coordinates in a text file, genes x cells; sorted by cell on disk."""

    def __init__(self, path: Path, n_obs: int, n_vars: int):
        self._path, self.shape = path, (n_obs, n_vars)
        with open_bytes(path) as text:
            self._dtype, self._n_values = self._header(text)

    def _header(self, text: IO[bytes]) -> tuple[type, int]:
        """dtype and number of the values; leaves `text` at the first of them."""
        with reading(self._path):
            first = text.readline(_LINE).decode("utf-8", "replace").lower().split()
            known = [["%%matrixmarket", "matrix", "coordinate", field, "general"] for field in _FIELDS]
            if first not in known:
                raise DataError(
                    f"{self._path}: expected '%%MatrixMarket matrix coordinate integer general' (or real), got "
                    f"{' '.join(first)[:80]!r}"
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

    def pieces(self) -> Pieces:
        if not self._n_values:  # pandas has an error for no lines
            return
        n_values, types = 0, {"gene": np.int64, "cell": np.int64, "value": self._dtype}
        with open_bytes(self._path) as text, reading(self._path), warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # more than three columns
            self._header(text)
            lines = pd.read_csv(
                text, sep=r"\s+", header=None, names=list(types), dtype=types, index_col=False,
                na_values=[], keep_default_na=False, chunksize=_PIECE,
            )  # fmt: skip
            for piece in lines:
                for name, size in (("gene", self.shape[1]), ("cell", self.shape[0])):
                    if len(piece) and not 1 <= piece[name].min() <= piece[name].max() <= size:
                        raise DataError(f"{self._path}: damaged: an index is outside 1 to {size:,}")
                yield piece["cell"].to_numpy() - 1, piece["gene"].to_numpy() - 1, piece["value"].to_numpy()
                n_values += len(piece)
        if n_values != self._n_values:
            raise DataError(
                f"{self._path}: truncated or damaged: {n_values:,} values of {self._n_values:,}; copy it again"
            )


def _matrices_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name.endswith(_MATRIX) and not file.name.startswith("."))


def _table(folder: Path, prefix: str, names: tuple[str, ...]) -> list[list[str]]:
    """Rows of the first table of `names` that is there, plain or gzip."""
    candidates = [folder / f"{prefix}{name}.tsv{end}" for name in names for end in ("", ".gz")]
    file = next((file for file in candidates if file.exists()), None)
    if file is None:
        raise DataError(f"{folder}: no {prefix}{names[0]}.tsv; expected it beside {prefix}matrix.mtx, plain or as .gz")
    with open_bytes(file) as lines, reading(file):
        rows = [line.decode().rstrip("\r\n").split("\t") for line in lines]
    if len(rows) > MAX_LENGTH:
        raise DataError(f"{file}: has {len(rows):,} lines; the limit is {MAX_LENGTH:,}")
    return rows


FORMAT = Format(
    "folder with matrix.mtx",
    lambda path, file: path.name.endswith(_MATRIX) or (path.is_dir() and bool(_matrices_in(path))),
    _open_mtx,
)
