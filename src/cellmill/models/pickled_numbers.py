"""Reader of a pickled dictionary of numbers, such as Geneformer's, that runs nothing of the file."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from cellmill.errors import DataError
from cellmill.files import require_file

NUMBERS = ("f8", "f4", "f2", "i8", "i4", "i2", "u8", "u4", "u2")
"""Types of numpy scalars in pickles."""


class _Dtype:
    """Stand-in for numpy.dtype: its letter and size, such as f8, and its byte order."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = str(code)
        self.order = "<"

    def __setstate__(self, state: Any) -> None:
        self.order = ">" if state[1] == ">" else "<"


def _scalar(dtype: Any, raw: Any) -> int | float:
    if not isinstance(dtype, _Dtype) or dtype.code not in NUMBERS:
        raise pickle.UnpicklingError("a numpy scalar that is not a number")
    raw = raw.encode("latin1") if isinstance(raw, str) else raw
    number: int | float = np.frombuffer(raw, dtype.order + dtype.code, count=1)[0].item()
    return number


def _latin1(text: Any, encoding: Any) -> bytes:  # bytes, which protocols below 3 write as text
    if encoding != "latin1":
        raise pickle.UnpicklingError("text in another encoding than latin1")
    return str(text).encode("latin1")


ALLOWED = {
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("_codecs", "encode"): _latin1,
}
"""Globals that a pickle may name, and the stand-in for each.

A plain unpickle would import and call any global.
"""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return ALLOWED[module, name]


def read_numbers(path: Path) -> dict[str, int | float]:
    """Return the dictionary of texts to numbers in a pickle, or raise DataError."""
    require_file(path)
    expected = f"{path}: expected a pickled dictionary of texts and numbers, got"
    try:
        with path.open("rb") as file:
            value = _Unpickler(file).load()
    except Exception as error:  # damaged bytes raise almost anything; nothing of the file has run
        problem = str(error) or type(error).__name__
        raise DataError(f"{expected} one that cannot be read safely: {problem}") from None
    is_valid = isinstance(value, dict) and all(
        type(key) is str and type(number) in (int, float) for key, number in value.items()
    )
    if not is_valid:
        raise DataError(f"{expected} other values")
    return dict(value)
