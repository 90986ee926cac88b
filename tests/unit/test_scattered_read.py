"""One read into many places: the bytes of the file in order, and no place outside the array."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cellmill.data.shards.reader import places, read_places


def test_bytes_of_a_file_go_to_their_places_and_nowhere_else(tmp_path: Path) -> None:
    stored, memory = np.arange(100, dtype=np.int32), np.full(20, -1, np.int32)
    (tmp_path / "numbers").write_bytes(stored.tobytes())
    table = places(memory, np.array([15, 0, 4, 6]), np.array([5, 3, 0, 2]))
    descriptor = os.open(tmp_path / "numbers", os.O_RDONLY)
    assert read_places(descriptor, table, 4 * 50) == 4 * 10
    assert memory.tolist() == [55, 56, 57, -1, -1, -1, 58, 59, *[-1] * 7, 50, 51, 52, 53, 54]
    assert read_places(descriptor, table, 4 * 99) == 4  # the end of the file
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_places(descriptor, table, 0)


@pytest.mark.parametrize(("start", "size"), [(-1, 2), (19, 2), (21, 0), (3, -1)])
def test_a_place_outside_the_array_is_refused(start: int, size: int) -> None:
    with pytest.raises(IndexError, match="expected places within 20 entries"):
        places(np.empty(20, np.uint16), np.array([0, start]), np.array([1, size]))
