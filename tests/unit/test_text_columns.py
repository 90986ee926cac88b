"""Text of obs and var is the same for objects, strings of pandas and categories, with and without
missing values.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata.io import read_elem, write_elem

from cellmill.config.datasets import ObsColumns
from cellmill.data.arrays import plain_text, text_values
from cellmill.data.genes.names import is_expression
from cellmill.data.inputs.anndata_files import open_anndata
from cellmill.data.inputs.formats import declared_names
from cellmill.data.inputs.h5 import write_cells
from cellmill.data.prepare.obs import choose_obs
from cellmill.data.shards.reader import read_names
from cellmill.evaluate.labels import choose_cells
from cellmill.evaluate.splits import split_groups

KINDS = ["object", "string", "str", "category"]


def column(kind: str, values: list[str | None], index: Any = None) -> pd.Series:
    if kind == "category":
        return pd.Series(pd.Categorical(values), index=index)
    dtype: Any = kind
    if kind == "str":
        dtype = pd.StringDtype(storage="python", na_value=np.nan)
    return pd.Series(values, index=index, dtype=dtype)


def test_whole_numbers_have_one_text_in_every_type() -> None:
    for values in (
        pd.Series([1, 2, 1]),
        pd.Series([1.0, 2.0, 1.0]),
        pd.Series(["1", "2", "1"]),
        pd.Series(pd.Categorical([1.0, 2.0, 1.0])),
    ):
        assert text_values(values).tolist() == ["1", "2", "1"]
    assert text_values(pd.Series([1.5, np.nan])).tolist() == ["1.5", ""]
    assert text_values(pd.Series([True, False])).tolist() == ["True", "False"]
    assert text_values(pd.Series([], dtype=object)).tolist() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_var_row_without_a_feature_type_is_a_gene(kind: str) -> None:
    kinds = column(kind, ["Gene Expression", None, "Antibody Capture", " gene expression"])
    var = pd.DataFrame({"feature_types": kinds})
    assert is_expression(var).tolist() == [True, True, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_leave_cells_without_a_value_out(kind: str) -> None:
    values = column(kind, ["a", None, "b", "a", None, "c"])
    tested: list[int] = []
    for _, _, test in split_groups(values, 3):
        tested += test.tolist()
    assert sorted(tested) == [0, 2, 3, 5]
    chosen = choose_cells(values, 1, seed=0)
    assert chosen.classes == {"a": 2, "b": 1, "c": 1}
    assert chosen.labels.tolist() == ["a", "b", "a", "c"]
    assert chosen.n_unlabelled == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_without_a_perturbation_is_not_a_control(kind: str) -> None:
    guide = column(kind, ["ctrl", None, "x"])
    obs = pd.DataFrame({"guide": guide})
    reader: Any = SimpleNamespace(
        obs=obs,
        obs_names=obs.index,
        n_obs=3,
        path=Path("a.h5ad"),
        obs_column=lambda name, owner: obs[name],
        written_column=lambda name: obs[name],
        var_names=[],
        var=pd.DataFrame(),
    )
    columns = ObsColumns(perturbation="guide", control="ctrl")
    made = choose_obs(reader, [], columns).obs
    assert made["is_control"].tolist() == [True, False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_written_plain_so_that_every_version_reads_it(tmp_path: Path, kind: str) -> None:
    names = ["c1", "c2", "c3"]
    index = pd.Index(names if kind == "category" else column(kind, names))
    donor = column(kind, ["d", None, "e"], index)
    whole = column(kind, ["x", "y", "x"], index)
    obs = pd.DataFrame({"donor": donor, "whole": whole})
    path = tmp_path / "a.h5ad"
    ones = np.ones((3, 2), np.uint16)
    counts = sp.csr_matrix(ones)
    ids = ["ENSG00000000003", "ENSG00000000005"]
    genes = pd.DataFrame({"symbol": ["g", "h"]}, index=ids)
    dtype = np.dtype("<u2")
    write_cells(path, plain_text(obs), genes, [counts], counts.nnz, dtype)
    assert read_names(path, "var").tolist() == ids
    with h5py.File(path) as file:
        index_name = file["obs"].attrs["_index"]
        assert isinstance(file["obs"][index_name], h5py.Dataset)
        assert isinstance(file["obs/donor/categories"], h5py.Dataset)
        back = read_elem(file["obs"])
    assert text_values(back["donor"]).tolist() == ["d", "", "e"]
    assert text_values(back["whole"]).tolist() == ["x", "y", "x"]


def test_masked_text_of_pandas_3_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.h5ad"
    with h5py.File(path, "w") as file:
        names = {"obs": ["c1", "c2"], "var": ["ENSG1", "ENSG2"]}
        for name, texts in names.items():
            index = pd.Index(texts, dtype=object)
            frame = pd.DataFrame({"n": [1, 2]}, index=index)
            write_elem(file, name, frame)
            del file[name]["_index"]
            _masked(file[name], "_index", texts)
        group = file["obs"].create_group("donor")
        group.attrs["encoding-type"] = "categorical"
        group.attrs["encoding-version"] = "0.2.0"
        group.attrs["ordered"] = False
        group["codes"] = np.array([1, 0], np.int8)
        _masked(group, "categories", ["d", "e"])
        file["obs"].attrs["column-order"] = np.array(["n", "donor"], object)
        ones = np.ones((2, 2), np.float32)
        write_elem(file, "X", sp.csr_matrix(ones))
    assert read_names(path, "var").tolist() == ["ENSG1", "ENSG2"]
    with declared_names(path) as names:
        assert names is not None
        assert names.categories_of("donor") == ["d", "e"]
    with h5py.File(path) as file:
        source = open_anndata(path, file, "X")
    assert source.obs.index.tolist() == ["c1", "c2"]
    assert source.var.index.tolist() == ["ENSG1", "ENSG2"]


def _masked(group: h5py.Group, name: str, texts: list[str]) -> None:
    made = group.create_group(name)
    made.attrs["encoding-type"] = "nullable-string-array"
    made.attrs["encoding-version"] = "0.1.0"
    write_elem(made, "values", np.array(texts, object))
    write_elem(made, "mask", np.zeros(len(texts), bool))
