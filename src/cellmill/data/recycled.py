"""Memory of large arrays that is used again.

A fresh array of a megabyte costs a page fault for every 4 KiB, which takes longer than filling it.
No consumer has to release an array: its memory is free when the last reference to it, a view of it
or a tensor over it is gone.
"""

import ctypes
import weakref
from collections import defaultdict, deque

import numpy as np

_MIN_BYTES = 1 << 16  # smaller arrays are as cheap from the allocator
# free blocks of each size: enough for the windows that are read, and for the batches that are made,
# queued and used
_MAX_FREE = 8
_free: defaultdict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=_MAX_FREE))


def recycled_empty(size: int, dtype: np.dtype | type) -> np.ndarray:
    """`(size,)` of `dtype` with arbitrary values, as `np.empty`; may be called by any thread."""
    n_bytes = int(size) * np.dtype(dtype).itemsize
    if n_bytes < _MIN_BYTES:
        return np.empty(size, dtype)
    # few sizes, so that a later array fits; pages never written cost nothing
    block = 1 << (n_bytes - 1).bit_length()
    free = _free[block]
    try:
        memory = free.pop()
    except IndexError:
        memory = np.empty(block, np.uint8)
    # every view of the array refers to `lent`, which returns the memory when the last one is gone
    lent = (ctypes.c_char * block).from_buffer(memory.data)
    weakref.finalize(lent, free.append, memory).atexit = False
    return np.frombuffer(memoryview(lent), dtype, int(size))
