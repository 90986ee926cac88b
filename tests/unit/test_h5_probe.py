"""A file on which HDF5 loops or crashes is named in one line, by a child process; others are left to their reader."""

from __future__ import annotations

import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from cellmill.data.inputs import h5_walk
from cellmill.data.inputs.formats import open_dataset
from cellmill.errors import DataError


def a_file(path: Path) -> Path:
    """HDF5 with an attribute of text, which stands in a global heap."""
    with h5py.File(path, "w") as file:
        file.create_dataset("X", data=np.zeros(4)).attrs["encoding-type"] = "csr_matrix"
    return path


def zeroed(path: Path) -> Path:
    """The file, with zeros where the sizes of the objects in its global heap stand: reading the text then loops."""
    content = bytearray(a_file(path).read_bytes())
    heap = content.index(b"GCOL") + 16
    content[heap : heap + 512] = bytes(512)
    path.write_bytes(content)
    return path


def test_a_file_on_which_hdf5_loops_is_one_line_and_those_before_it_are_fine(tmp_path: Path) -> None:
    whole, damaged = a_file(tmp_path / "a.h5ad"), zeroed(tmp_path / "b.h5ad")
    message = re.escape(f"{damaged}: damaged: HDF5 was not through its structure after 1 s of CPU time; copy it again")
    with pytest.raises(DataError, match=f"^{message}"):
        h5_walk.check_walk([whole, damaged], limit_s=1)


def test_inputs_are_walked_once_before_they_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h5_walk.check_walk, "__defaults__", (1,))
    with pytest.raises(DataError, match="damaged: HDF5 was not through"):
        open_dataset(zeroed(tmp_path / "b.h5ad"))
    whole = a_file(tmp_path / "a.h5ad")
    h5_walk.check_walk([whole])
    monkeypatch.setattr(h5_walk.sys, "executable", "/no such interpreter")
    h5_walk.check_walk([whole, tmp_path / "absent.h5ad", tmp_path])
    text = tmp_path / "text.h5ad"
    text.write_text("no HDF5")
    h5_walk.check_walk([text])
