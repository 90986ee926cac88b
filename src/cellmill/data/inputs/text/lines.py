"""Lines of three numbers, as Matrix Market has them, read in pieces of some megabytes.

Long files are parsed by a loop that numba compiles in about a second. A piece with anything that
the loop does not know, such as a comment between values, goes through pandas, which also names what
is wrong; so do short files.
"""

import importlib
import io
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

from cellmill.data.inputs.h5 import reading
from cellmill.errors import DataError

_PIECE_BYTES = 1 << 24  # bytes in memory at once
_SHOWN = 80  # bytes of a line in an error
_MAX_WHOLE = 2**31 - 1  # largest whole number, since they are held in 32 bits
_MIN_COMPILED = 1 << 21  # fewer values are read sooner than numba compiles the loop

Triples = Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]


def read_triples(
    path: Path, text: IO[bytes], dtype: type, shape: tuple[int, int], n_values: int
) -> Triples:
    """Yield row and column, from 0, and value of each line, in pieces.

    Raises DataError for an index outside `shape`.
    """
    parse = _load_loop() if n_values >= _MIN_COMPILED else None
    buffer = bytearray(_PIECE_BYTES)
    held = 0  # bytes of a line that is not complete
    with reading(path):
        while n_read := text.readinto(memoryview(buffer)[held:]):  # type: ignore[attr-defined]
            end = buffer.rfind(b"\n", held, held + n_read) + 1
            if end:
                yield _read_piece(path, memoryview(buffer)[:end], dtype, shape, parse)
                buffer[: held + n_read - end] = buffer[end : held + n_read]
            held += n_read - end
            if held == len(buffer):
                raise DataError(
                    f"{path}: damaged: expected three numbers a line, got a line of {held:,} bytes"
                )
        if buffer[:held].strip():
            yield _read_piece(path, memoryview(buffer)[:held], dtype, shape, None)


def _read_piece(
    path: Path, piece: memoryview, dtype: type, shape: tuple[int, int], parse: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if parse is not None:
        max_lines = len(piece) // 6 + 1  # the shortest line is `1 1 1`
        rows = np.empty(max_lines, np.int32)
        columns = np.empty(max_lines, np.int32)
        values: np.ndarray = np.empty(max_lines, dtype)
        n = parse(
            np.frombuffer(piece, np.uint8),
            rows,
            columns,
            values,
            *shape,
            dtype is np.int32,
        )
        if n >= 0:
            return rows[:n], columns[:n], values[:n]
    if not piece.tobytes().strip():
        nothing = np.empty(0, np.int64)
        return nothing, nothing, np.empty(0, dtype)
    is_whole = dtype is np.int32
    types = {"row": np.int64, "column": np.int64, "value": np.int64 if is_whole else dtype}
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # more than three columns
        try:
            table = pd.read_csv(
                io.BytesIO(piece.tobytes()), sep=r"\s+", header=None, names=list(types), dtype=types, index_col=False,
                na_values=[], keep_default_na=False, float_precision="round_trip",
            )  # fmt: skip
        except pd.errors.ParserWarning:
            first = piece[:_SHOWN].tobytes().partition(b"\n")[0].decode("ascii", "replace")
            raise DataError(
                f"{path}: expected three numbers a line, got more, such as {first!r}"
            ) from None
    for name, size in zip(types, shape):
        if len(table) and not 1 <= table[name].min() <= table[name].max() <= size:
            raise DataError(f"{path}: damaged: an index is outside 1 to {size:,}")
    values = table["value"].to_numpy()
    if is_whole and len(values) and int(np.abs(values).max()) > _MAX_WHOLE:
        raise DataError(
            f"{path}: a value is too large: expected at most {_MAX_WHOLE:,}, got {np.abs(values).max():,}"
        )
    return (
        table["row"].to_numpy() - 1,
        table["column"].to_numpy() - 1,
        values.astype(dtype, copy=False),
    )


@cache
def _load_loop() -> Any:
    """Import the compiled loop; None without numba."""
    try:
        return importlib.import_module("cellmill.data.loops.line_loop").parse_triples
    except ImportError:
        return None
