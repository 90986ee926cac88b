"""Memory of batches: used again once nothing refers to it, and never before."""

from __future__ import annotations

import numpy as np
import torch

from cellmill.data.stream.batch import recycled_empty

SIZE = 1_000_003  # no other test asks for blocks of this size


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_only_after_the_last_view_or_tensor_over_it_is_gone() -> None:
    first = recycled_empty(SIZE, np.float64)
    first[:] = 1
    memory = address(first)
    tensor = torch.from_numpy(first[10:20].reshape(2, 5))
    del first
    second = recycled_empty(SIZE, np.float64)
    assert address(second) != memory
    second[:] = 2
    assert tensor.tolist() == [[1.0] * 5] * 2
    del tensor
    third = recycled_empty(2 * SIZE - 5, np.int32)  # another type and size of the same block
    assert address(third) == memory
    assert third.shape == (2 * SIZE - 5,)
    assert third.dtype == np.int32
    assert third.flags.writeable


def test_small_arrays_are_the_allocators() -> None:
    assert recycled_empty(7, np.int16).base is None
