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
from cellmill.evaluate.tasks.classify import splits_of

KINDS = ["object", "string", "str", "category"]


def column(kind: str, values: list[str | None], index: Any = None) -> pd.Series:
    if kind == "category":
        return pd.Series(pd.Categorical(values), index=index)
    dtype: Any = {"str": pd.StringDtype(storage="python", na_value=np.nan)}.get(kind, kind)
    return pd.Series(values, index=index, dtype=dtype)


def test_values_have_the_text_of_astype_str() -> None:
    for values in (
        [1.5, 2.0, 1e20],
        [1, 2, 1],
        [True, False],
        pd.to_datetime(["2020-01-01", "2021-02-03"]),
    ):
        assert text_values(pd.Series(values)).tolist() == pd.Series(values).astype(str).tolist()
    assert text_values(pd.Series([], dtype=object)).tolist() == []
    assert text_values(pd.Series([np.nan, 3.0])).tolist() == ["", "3.0"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_var_row_without_a_feature_type_is_a_gene(kind: str) -> None:
    kinds = column(kind, ["Gene Expression", None, "Antibody Capture", " gene expression"])
    assert is_expression(pd.DataFrame({"feature_types": kinds})).tolist() == [
        True,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_leave_cells_without_a_value_out(kind: str) -> None:
    values = column(kind, ["a", None, "b", "a", None, "c"])
    assert sorted(cell for _, test in splits_of(values, 3) for cell in test) == [0, 2, 3, 5]
    chosen = choose_cells(values, 1, seed=0)
    assert chosen.classes == {"a": 2, "b": 1, "c": 1}
    assert (chosen.labels.tolist(), chosen.n_unlabelled) == (["a", "b", "a", "c"], 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_without_a_perturbation_is_not_a_control(kind: str) -> None:
    obs = pd.DataFrame({"guide": column(kind, ["ctrl", None, "x"])})
    reader: Any = SimpleNamespace(
        obs=obs, n_obs=3, path=Path("a.h5ad"), obs_column=lambda name, owner: obs[name]
    )
    reader.var_names = []
    reader.var = pd.DataFrame()
    columns = ObsColumns(perturbation="guide", control="ctrl")
    made = choose_obs(reader, [], columns).obs
    assert made["is_control"].tolist() == [True, False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_written_plain_so_that_every_version_reads_it(tmp_path: Path, kind: str) -> None:
    names = (
        pd.Index(column(kind, ["c1", "c2", "c3"]))
        if kind != "category"
        else pd.Index(["c1", "c2", "c3"])
    )
    obs = pd.DataFrame(
        {"donor": column(kind, ["d", None, "e"], names), "whole": column(kind, list("xyx"), names)}
    )
    path = tmp_path / "a.h5ad"
    counts = sp.csr_matrix(np.ones((3, 2), np.uint16))
    genes = pd.DataFrame(
        {"symbol": ["g", "h"]}, index=pd.Index(["ENSG00000000003", "ENSG00000000005"])
    )
    write_cells(path, plain_text(obs), genes, [counts], counts.nnz, np.dtype("<u2"))
    assert read_names(path, "var").tolist() == ["ENSG00000000003", "ENSG00000000005"]
    with h5py.File(path) as file:
        assert isinstance(file["obs"][file["obs"].attrs["_index"]], h5py.Dataset)
        assert isinstance(file["obs/donor/categories"], h5py.Dataset)
        back = read_elem(file["obs"])
    assert text_values(back["donor"]).tolist() == ["d", "", "e"]
    assert text_values(back["whole"]).tolist() == ["x", "y", "x"]


def test_masked_text_of_pandas_3_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.h5ad"
    with h5py.File(path, "w") as file:
        for name, texts in (("obs", ["c1", "c2"]), ("var", ["ENSG1", "ENSG2"])):
            write_elem(file, name, pd.DataFrame({"n": [1, 2]}, index=pd.Index(texts, dtype=object)))
            del file[name]["_index"]
            _masked(file[name], "_index", texts)
        group = file["obs"].create_group("donor")
        group.attrs.update(
            {"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False}
        )
        group["codes"] = np.array([1, 0], np.int8)
        _masked(group, "categories", ["d", "e"])
        file["obs"].attrs["column-order"] = np.array(["n", "donor"], object)
        write_elem(file, "X", sp.csr_matrix(np.ones((2, 2), np.float32)))
    assert read_names(path, "var").tolist() == ["ENSG1", "ENSG2"]
    with declared_names(path) as names:
        assert names is not None
        assert names.categories_of("donor") == ["d", "e"]
    with h5py.File(path) as file:
        source = open_anndata(path, file, "X")
    assert (list(source.obs.index), list(source.var.index)) == (["c1", "c2"], ["ENSG1", "ENSG2"])


def _masked(group: h5py.Group, name: str, texts: list[str]) -> None:
    made = group.create_group(name)
    made.attrs.update({"encoding-type": "nullable-string-array", "encoding-version": "0.1.0"})
    write_elem(made, "values", np.array(texts, object))
    write_elem(made, "mask", np.zeros(len(texts), bool))
