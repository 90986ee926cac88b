"""HDF5 files: opening with one-line errors, and writing that survives a full disk.

Cells are written for other programs as .h5ad with contiguous, unfiltered CSR; `packed_cells` writes
those of the pipeline.
"""

from __future__ import annotations

import gzip
import io
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import h5py
import numpy as np
import scipy.sparse as sp

from cellmill.data.arrays import plain_text
from cellmill.data.inputs.h5_walk import open_without_locks
from cellmill.errors import ConfigError, DataError, UserError
from cellmill.files import FULL, atomic_path, check_writable, named_errors, require_file

if TYPE_CHECKING:
    import pandas as pd

UNREADABLE = (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError)
"""Errors that libraries raise for a damaged header."""
_GZIP = b"\x1f\x8b"  # first bytes of a gzip file
ALIGNMENT = 4096  # bytes; for direct I/O and page-aligned preads
_MAPPINGS = ("layers", "obsm", "obsp", "varm", "varp", "uns")


def open_h5(path: Path, remedy: str = "") -> h5py.File:
    """Open `path` for reading.

    Raises DataError, ending in `remedy`, if it is missing, truncated or not HDF5.
    """
    then = f"; {remedy}" if remedy else ""
    try:
        require_file(path)
        return open_without_locks(path)
    except DataError as error:
        fault = str(error)
    except OSError as error:
        text = one_line(error)
        fault = f"{path}: cannot be read: {text}"
        if "truncated" in text:
            stored = re.search(r"stored_eof = (\d+)", text)
            whole = f" of {int(stored[1]):,}" if stored else ""
            fault = f"{path}: truncated: {path.stat().st_size:,}{whole} bytes"
            then = then or "; copy it again"
        elif "signature not found" in text:
            fault = (
                f"{path}: not an HDF5 file" if path.stat().st_size else f"{path}: empty: 0 bytes"
            )
    raise DataError(f"{fault}{then}")


def decode(value: Any) -> str:
    """Text of a stored value, which may be bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def read_texts(item: h5py.Dataset | h5py.Group) -> np.ndarray:
    """Read the text of an array as anndata stores it, `(n,)` object.

    It is stored plain, or as a group of values and a mask of missing values.
    """
    if isinstance(item, h5py.Dataset):
        # an empty array may be of numbers
        return np.asarray(item.asstr()[:] if len(item) else [], object)
    texts = np.asarray(item["values"].asstr()[:], object)
    if "mask" in item:
        texts[item["mask"][:]] = "nan"
    return texts


def check_h5ad(out: Path, option: str) -> None:
    """Raise ConfigError for an output that is not named .h5ad, or that could not be written."""
    if out.suffix != ".h5ad":
        raise ConfigError(f"{option} {out}: expected a name that ends in .h5ad")
    check_writable(out, option)


class NewH5File(h5py.File):
    """HDF5 file being written or changed, through `disk`."""

    disk: _Disk


class FrameColumns(NamedTuple):
    """A data frame whose columns are made one at a time."""

    index: pd.Index
    columns: Iterable[pd.Series]


@contextmanager
def create_h5(
    path: Path, alignment: int = ALIGNMENT, copy_of: Path | None = None
) -> Iterator[NewH5File]:
    """Yield a new .h5ad, which replaces `path` when the block ends without an error.

    It is empty, or a copy to change. Arrays and chunks of at least `alignment` bytes begin at a
    multiple of it. Raises OSError naming `path` when the disk is full.
    """
    aligned = {"alignment_threshold": alignment, "alignment_interval": alignment}
    with named_errors(path), atomic_path(path, copy_of) as temporary:
        if copy_of is not None:
            _copy(copy_of, temporary)
        with _Disk(temporary, "r+") as disk:
            try:
                with NewH5File(disk, "w" if copy_of is None else "r+", **aligned) as file:
                    file.disk = disk
                    file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
                    yield file
            except (OSError, RuntimeError) as error:
                raise disk.error or error from None
            disk.raise_if_failed()


def _copy(source: Path, target: Path) -> None:
    """Copy a file.

    If the disk of the copy is full, raise an OSError without a name, since shutil's names the source.
    """
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        if error.errno in FULL:
            raise OSError(error.errno, error.strerror) from None
        raise


class _Disk(io.FileIO):
    """The file object under an HDF5 file.

    It keeps the first failed write as `error` and drops all later writes, so that HDF5 can still close
    the file in order.
    """

    error: OSError | None = None

    def raise_if_failed(self) -> None:
        """Raise the first failed write, if any.

        It serves to stop early, since closing the file raises it too.
        """
        if self.error is not None:
            raise self.error

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while len(rest) and self.error is None:  # a disk that fills up takes a part first
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            if self.error is None:
                super().truncate(size)
        except OSError as error:
            self.error = error
        return size or 0

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        n_read = super().readinto(view) or 0
        view[n_read:] = bytes(len(view) - n_read)  # dropped by a failed write
        return len(view)


def one_line(error: BaseException) -> str:
    """Message of `error` in one line of at most 300 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file to read, plain or, by its first bytes, gzip.

    Raises DataError if it is not a regular file.
    """
    require_file(path)
    with open(path, "rb") as file:
        is_gzip = file.read(2) == _GZIP
    return gzip.open(path) if is_gzip else open(path, "rb")  # type: ignore[return-value]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise DataError naming `path` for whatever a library raises on a damaged file."""
    try:
        yield
    except UserError:
        raise
    except MemoryError:
        raise DataError(f"{path}: damaged, or needs more memory than there is") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"{path}: expected UTF-8 text, got byte 0x{byte:02x}; save the file as UTF-8"
        ) from None
    except Exception as error:  # h5py, zarr, codecs, numpy and pandas raise errors of many kinds
        raise DataError(f"{path}: damaged: {one_line(error)}") from None


def count_dtype(largest: int) -> np.dtype[Any]:
    """uint16 if counts up to `largest` fit, else uint32."""
    return np.dtype("<u2" if largest <= np.iinfo(np.uint16).max else "<u4")


def write_cells(
    path: Path,
    obs: pd.DataFrame,
    var: pd.DataFrame,
    blocks: Iterable[sp.csr_matrix],
    nnz: int | None,
    dtype: np.dtype[Any],
    ordered: bool = False,
    ranked: bool = False,
    recorded: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write an .h5ad whose X is CSR: `dtype` data, int32 indices, int64 indptr, little-endian.

    `blocks` are rows in order, columns in any order within a row; one is held in memory at a time.
    With `nnz`, the number of all values, arrays are contiguous and aligned to 4,096 bytes; without
    it they grow in chunks. `ordered` rows are sequences, `ranked` ones genes in rank order;
    uns/cellmill gets `recorded`. Raises OSError naming `path`, which stays as it was, on a full
    disk.
    """
    layout: dict[str, Any] = {"shape": (nnz,)}
    if nnz is None:
        layout = {"shape": (0,), "maxshape": (None,), "chunks": (1 << 18,)}
    with create_h5(path) as file:
        group = file.create_group("X")
        data = group.create_dataset("data", dtype=dtype.newbyteorder("<"), **layout)
        indices = group.create_dataset("indices", dtype="<i4", **layout)
        start = 0
        indptr = [np.zeros(1, np.int64)]
        for block in blocks:
            assert not block.nnz or block.data.max() <= np.iinfo(dtype).max, (
                f"a count is too large for {dtype}"
            )
            stop = start + block.nnz
            if nnz is None:
                data.resize((stop,))
                indices.resize((stop,))
            if block.nnz:
                data[start:stop] = block.data.astype(dtype, copy=False)
                indices[start:stop] = block.indices
                file.disk.raise_if_failed()
            indptr.append(start + block.indptr[1:].astype(np.int64))
            start = stop
        assert start == len(data), f"expected {len(data)} values, got {start}"
        group.create_dataset("indptr", data=np.concatenate(indptr))
        n_rows = sum(map(len, indptr)) - 1
        assert len(obs) == n_rows, f"{len(obs)} obs for {n_rows} rows"
        shape = np.array([n_rows, len(var)], np.int64)
        group.attrs.update(
            {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape}
        )
        write_frames(file, obs, var, ordered, ranked, recorded)


def write_frames(
    file: h5py.File,
    obs: pd.DataFrame | FrameColumns,
    var: pd.DataFrame,
    ordered: bool,
    ranked: bool,
    recorded: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write everything of an .h5ad but the counts; uns/cellmill gets `recorded`, and what rows are."""
    record = dict(recorded)
    if ordered:
        record["ordered"] = True
    if ranked:
        record["ranked"] = True
    uns = {"cellmill": record} if record else {}
    if not isinstance(obs, FrameColumns):
        _write_parts(file, {"obs": obs, "var": var, "uns": uns})
        return
    frame = import_module("pandas").DataFrame(index=obs.index)
    _write_parts(file, {"obs": frame, "var": var, "uns": uns})
    write_columns(file["obs"], obs.columns)


def write_anndata(file: h5py.File, adata: Any) -> None:
    """Write an AnnData to a new file.

    `AnnData` turns text into the `str` of pandas 3, which anndata 0.12 refuses to write.
    """
    if adata.X is not None:
        import_module("anndata.io").write_elem(file, "X", adata.X)
    parts = {name: getattr(adata, name) for name in ("obs", "var")}
    for name in _MAPPINGS:
        # anndata 0.13 lists X in `layers`, under the key None: X has an element of its own
        parts[name] = {key: value for key, value in getattr(adata, name).items() if key is not None}
    _write_parts(file, parts)


def write_columns(group: h5py.Group, columns: Iterable[pd.Series]) -> None:
    """Add columns to a data frame that has none yet, one at a time, as anndata writes them."""
    write_elem = import_module("anndata.io").write_elem
    pandas = import_module("pandas")
    names = []
    for column in columns:
        [(name, plain)] = plain_text(pandas.DataFrame({column.name: column.array})).items()
        is_extension = isinstance(plain.dtype, pandas.api.extensions.ExtensionDtype)
        write_elem(group, name, plain.array if is_extension else plain.to_numpy())
        names.append(name)
    group.attrs["column-order"] = np.array(names, dtype=h5py.string_dtype())


def _write_parts(file: h5py.File, parts: Mapping[str, Any]) -> None:
    # two fifths of a second, which a reader does not need
    write_elem = import_module("anndata.io").write_elem
    for name in ("obs", "var"):
        write_elem(file, name, plain_text(parts[name]))
    for name in _MAPPINGS:
        write_elem(file, name, dict(parts.get(name, {})))
