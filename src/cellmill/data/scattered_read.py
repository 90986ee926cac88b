"""One read of consecutive bytes of a file into many memory locations, listed in an array.

`os.preadv` takes a list of buffers: to make it cost half a microsecond a cell, in which no other thread ran Python.
"""

import ctypes
import errno
import os

import numpy as np

_preadv = ctypes.CDLL(None, use_errno=True).preadv
_preadv.restype = ctypes.c_ssize_t
_preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]


def places(array: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Address and number of bytes of each `array[start : start + size]`, `(n, 2)` uint64: as C's `struct iovec`.

    The array must live as long as the table is used. Raises IndexError when a place is not in it.
    """
    assert array.ndim == 1
    assert array.flags.c_contiguous
    assert array.flags.writeable
    if len(starts) and (starts.min() < 0 or sizes.min() < 0 or (starts + sizes).max() > len(array)):
        raise IndexError(f"expected places within {len(array):,} entries")
    table = np.empty((len(starts), 2), np.uint64)
    table[:, 0] = array.ctypes.data + array.itemsize * starts
    table[:, 1] = array.itemsize * sizes
    return table


def read_places(descriptor: int, table: np.ndarray, offset: int) -> int:
    """Fill the places of `table`, 1,024 at most, from `offset` of a file on. Returns the number of bytes read."""
    assert table.dtype == np.uint64
    assert table.flags.c_contiguous
    while (n_read := _preadv(descriptor, table.ctypes.data, len(table), offset)) < 0:
        if (number := ctypes.get_errno()) != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return int(n_read)
