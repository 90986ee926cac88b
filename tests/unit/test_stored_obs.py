"""obs of packed cells: columns are read one by one, and equal those of the whole frame."""

from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata.io import read_elem

from cellmill.data.inputs.formats import open_counts
from cellmill.data.inputs.packed_cells import write_packed
from cellmill.errors import DataError

OBS = pd.DataFrame(
    {
        "well": ["é1", None, "c3"],
        "batch": pd.Categorical(["a", None, "a"]),
        "depth": [1.5, np.nan, 3.0],
        "number": np.array([1, 2, 3], np.int32),
        "kept": [True, False, True],
    },
    index=pd.Index(["x", "y", "z"], dtype=object),
)


@pytest.fixture
def cells(tmp_path: Path) -> Path:
    path = tmp_path / "cells.h5ad"
    genes = pd.DataFrame(index=pd.Index(["g1", "g2"], dtype=object))
    counts = sp.csr_matrix(np.array([[1, 0], [2, 3], [0, 4]], np.uint32))
    write_packed(path, OBS, genes, [counts], "rank", np.dtype(np.uint16))
    return path


def test_columns_equal_those_of_the_whole_frame(cells: Path) -> None:
    with h5py.File(cells) as file:
        expected = read_elem(file["obs"])
    with open_counts(cells) as reader:
        assert reader.obs_names.tolist() == ["x", "y", "z"]
        assert reader.obs_columns == list(OBS.columns)
        part = reader.read_obs(["depth", "no such column", "well"])
        pd.testing.assert_frame_equal(part, expected[["depth", "well"]])
        for name in OBS.columns:
            pd.testing.assert_series_equal(reader.read_column(name), expected[name])
        pd.testing.assert_frame_equal(reader.obs, expected)


def test_a_damaged_column_is_named_when_it_is_read(cells: Path) -> None:
    with h5py.File(cells, "r+") as file:
        stored = file["obs/depth"]
        attributes = dict(stored.attrs)
        del file["obs/depth"]
        file["obs/depth"] = np.ones(2)
        file["obs/depth"].attrs.update(attributes)
        del file["obs/number"]
        del file["obs/well"]
        file["obs/well"] = np.ones((3, 2))
        file["obs/well"].attrs.update(attributes)
    with open_counts(cells) as reader:
        assert reader.read_column("kept").tolist() == [True, False, True]
        with pytest.raises(
            DataError, match=r"/obs/depth cannot be read: expected shape .3,., got .2,."
        ):
            reader.read_column("depth")
        with pytest.raises(
            DataError, match=r"/obs/well cannot be read: expected shape .3,., got .3, 2."
        ):
            reader.read_column("well")
        with pytest.raises(DataError, match="/obs/number cannot be read"):
            reader.read_obs(["number"])
        with pytest.raises(DataError, match="/obs/well cannot be read"):
            assert reader.obs is not None


def test_a_damaged_list_of_columns_is_one_line(cells: Path) -> None:
    with h5py.File(cells, "r+") as file:
        del file["obs"].attrs["column-order"]
    with pytest.raises(DataError, match="/obs cannot be read"):
        open_counts(cells)
