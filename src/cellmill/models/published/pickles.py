"""Pickled dictionaries of texts and numbers, read without running any code that the file names.

A plain unpickle imports and calls what the file asks for. Here only numpy's scalars may be asked for, and functions of
this module stand in for numpy's, so not even numpy is called with what the file says.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from cellmill.errors import DataError
from cellmill.files import require_file


class _Dtype:
    """Stand-in for numpy.dtype: its letter and size, such as f8, and its byte order."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = str(code), "<"

    def __setstate__(self, state: Any) -> None:
        self.order = ">" if state[1] == ">" else "<"


def _scalar(dtype: Any, raw: Any) -> int | float:
    """Number of a numpy scalar, integer or floating point."""
    if not isinstance(dtype, _Dtype) or dtype.code not in ("f8", "f4", "f2", "i8", "i4", "i2", "u8", "u4", "u2"):
        raise pickle.UnpicklingError("a numpy scalar that is no number")
    raw = raw.encode("latin1") if isinstance(raw, str) else raw
    number: int | float = np.frombuffer(raw, dtype.order + dtype.code, count=1)[0].item()
    return number


def _latin1(text: Any, encoding: Any) -> bytes:
    """Bytes, which protocols below 3 write as text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError("text in another encoding than latin1")
    return str(text).encode("latin1")


ALLOWED = {
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("_codecs", "encode"): _latin1,
}
"""Globals that a file may name, and what stands in for each."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return ALLOWED[module, name]


def read_numbers(path: Path) -> dict[str, int | float]:
    """Return the dictionary in a pickle, of texts to numbers. Raises DataError for anything else in it."""
    require_file(path)
    try:
        with path.open("rb") as file:
            value = _Unpickler(file).load()
    except Exception as error:  # damaged bytes raise almost anything; nothing of the file has run
        problem = str(error) or type(error).__name__
        raise DataError(
            f"{path}: expected a pickled dictionary of texts and numbers, got one that cannot be read safely: {problem}"
        ) from None
    plain = isinstance(value, dict) and all(type(k) is str and type(v) in (int, float) for k, v in value.items())
    if not plain:
        raise DataError(f"{path}: expected a pickled dictionary of texts and numbers, got other values")
    return dict(value)
