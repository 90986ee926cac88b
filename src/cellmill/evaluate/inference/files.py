"""Result files of evaluations: embeddings and predictions in .h5ad files, and scores.csv.

Embeddings and predictions are written to a file of their own or added to a copy of the cells' file.
"""

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
from anndata.io import read_elem, write_elem

from cellmill.data.arrays import plain_text
from cellmill.data.inputs.h5 import create_h5, one_line, open_h5, write_anndata
from cellmill.data.inputs.reader import refuse_duplicates
from cellmill.errors import DataError
from cellmill.evaluate.inference.predict import (
    ABOUT_PREDICTION,
    LABEL,
    PROBABILITIES,
    PROBABILITY,
    REJECTED,
    SEEN,
    VALUE,
    Predicted,
)
from cellmill.files import atomic_path
from cellmill.runs.results import DatasetResult, Row

# in obsm and uns
KEY = "X_cellmill"
ABOUT = "cellmill"
OWN = f"obsm[{KEY!r}]"
EXTERNAL = "obsm['X_emb']"
PATHS = {OWN: f"obsm/{KEY}", EXTERNAL: "obsm/X_emb", "X": "X"}
AGAIN = "run embed again"
# beginnings of the names of obs columns of `predict`
OWN_COLUMNS = (LABEL, PROBABILITY, REJECTED, SEEN, VALUE)
FIELDS = ("dataset", "task", "name", "kind", "column", "statistic", "repetition", "value")


def write_embedding(
    path: Path,
    obs: pd.DataFrame,
    vectors: np.ndarray,
    about: dict[str, Any],
    source: Path | None = None,
) -> None:
    """Write obsm["X_cellmill"] and uns["cellmill"] with `obs`, or added to a copy of the .h5ad
    `source`.
    """
    with create_h5(path, copy_of=source) as file:
        _add(file, obs, {KEY: vectors}, {ABOUT: about}, source)


def write_prediction(
    path: Path, obs: pd.DataFrame, predicted: Predicted, source: Path | None = None
) -> None:
    """Write the predictions with `obs`, or in place of another model's in a copy of the .h5ad
    `source`.
    """
    columns = predicted.obs
    with create_h5(path, copy_of=source) as file:
        _add(
            file, obs.assign(**columns), predicted.obsm, {ABOUT_PREDICTION: predicted.about}, source
        )
        if source is None:
            return
        obs = file["obs"]
        if not isinstance(obs, h5py.Group):
            raise DataError(
                f"{source}: its obs is of an AnnData before 0.7; read and write it once, or leave out --append"
            )
        for name in [name for name in obs if name.startswith(OWN_COLUMNS) and name not in columns]:
            del obs[name]
        for name in [
            name
            for name in file["obsm"]
            if name.startswith(PROBABILITIES) and name not in predicted.obsm
        ]:
            del file["obsm"][name]
        for name, column in plain_text(pd.DataFrame(columns)).items():
            write_elem(
                obs,
                name,
                column.array
                if isinstance(column.dtype, pd.CategoricalDtype)
                else column.to_numpy(),
            )
        order = [name for name in obs.attrs["column-order"] if name not in columns and name in obs]
        obs.attrs["column-order"] = np.array([*order, *columns], dtype=h5py.string_dtype())


def _add(
    file: h5py.File,
    obs: pd.DataFrame,
    obsm: Mapping[str, Any],
    uns: Mapping[str, Any],
    source: Path | None,
) -> None:
    """Write these entries without X or, to a copy of `source`, those of obsm and uns."""
    # anndata's own writer of files crashes the interpreter when the disk is full
    if source is None:
        write_anndata(file, ad.AnnData(obs=obs, obsm=dict(obsm), uns=dict(uns)))
        return
    for group, entries in (("obsm", obsm), ("uns", uns)):
        if group not in file:
            write_elem(file, group, {})
        for name, value in entries.items():
            write_elem(file[group], name, value)


def read_embedding(path: Path, names: pd.Index, model_digest: str, width: int | None) -> np.ndarray:
    """Vectors of a file written by `write_embedding`, `(cells, width)` float32; a row is finite, or
    all NaN.

    None is any width. Raises DataError when the file is of another model, or its obs names are not
    `names` in this order.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file; run embed first")
    with open_h5(path, AGAIN) as file:
        _, _, vectors, about = _read(file, str(path), (OWN,), names, "the dataset", f"; {AGAIN}")
    digest = str(about.get("model_digest"))
    if digest != model_digest:
        raise DataError(
            f"{path}: made by model {digest[:12]}, expected {model_digest[:12]}; {AGAIN}"
        )
    if width not in (None, vectors.shape[1]):
        raise DataError(
            f"{path}: {OWN}: expected {width:,} columns, got {vectors.shape[1]:,}; {AGAIN}"
        )
    finite = np.isfinite(vectors)
    wrong = (finite.any(axis=1) != finite.all(axis=1)) | np.isinf(vectors).any(axis=1)
    if wrong.any():
        raise DataError(
            f"{path}: cell {int(wrong.argmax()) + 1:,} has numbers that are not finite; {AGAIN}"
        )
    return vectors


def read_costs(path: Path) -> dict[str, float]:
    """`seconds`, `peak_gb` and `coverage_frac` of the stage `embed` that wrote an embedding."""
    with open_h5(path, AGAIN) as file, _readable(f"{path}: uns[{ABOUT!r}]", f"; {AGAIN}"):
        return {
            name: float(read_elem(file["uns"][ABOUT][name]))
            for name in ("seconds", "peak_gb", "coverage_frac")
        }


def read_external(path: Path, names: pd.Index, command: str) -> np.ndarray:
    """Vectors of another model, `(cells, width)` float32, finite, from obsm["X_emb"], the file of
    stage embed, or X.

    Raises DataError, beginning with `command`, for anything else, such as other cells or another
    order.
    """
    if not path.exists():
        raise DataError(f"{command}: it ended well and wrote no file to {{out}}")
    with open_h5(path, command) as file:
        _, where, vectors, _ = _read(file, command, (EXTERNAL, OWN, "X"), names, "{cells}")
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise DataError(
            f"{command}: {int((~finite).sum()):,} cells have numbers in {where} that are not finite, the first is "
            f"{names[int((~finite).argmax())]!r}; expected an embedding of every cell"
        )
    return vectors


def read_vectors(path: Path) -> tuple[pd.Index, np.ndarray, dict[str, Any]]:
    """obs names and vectors of a file of stage embed, or of another package, and what the stage
    says of the model.

    Vectors are `(cells, width)` float32; a row is finite, or all NaN.
    """
    with open_h5(path) as file:
        names, _, vectors, about = _read(file, str(path), (OWN, EXTERNAL, "X"))
    refuse_duplicates(str(path), "obs", names)
    vectors[~np.isfinite(vectors).all(axis=1)] = np.nan
    return names, vectors, about


def _read(
    file: h5py.File,
    source: str,
    wanted: tuple[str, ...],
    names: pd.Index | None = None,
    cells: str = "",
    remedy: str = "",
) -> tuple[pd.Index, str, np.ndarray, dict[str, Any]]:
    """obs names, which must be `names`; the first array of `wanted`, by name; and uns["cellmill"]
    with an own one.
    """
    with _readable(f"{source}: obs, obsm or uns", remedy):
        found = pd.Index(read_elem(file["obs"][file["obs"].attrs["_index"]])).astype(str)
        where = next((name for name in wanted if PATHS[name] in file), wanted[-1])
        stored = file.get(PATHS[where])
        about = dict(read_elem(file["uns"][ABOUT])) if where == OWN and stored is not None else {}
    if names is not None and not found.equals(names.astype(str)):
        at = next(
            (i for i, (a, b) in enumerate(zip(found, names)) if a != b), min(len(found), len(names))
        )
        there, here = (
            repr(index[at]) if at < len(index) else "no cell" for index in (found, names)
        )
        raise DataError(
            f"{source}: expected the {len(names):,} cells of {cells} in their order, got {len(found):,}; the first "
            f"that differs is cell {at + 1:,}, {there} instead of {here}{remedy}"
        )
    if not isinstance(stored, h5py.Dataset) or stored.ndim != 2 or stored.dtype.kind not in "fiu":
        # a null dataset, as anndata 0.12 writes for X = None, has no shape
        dense = isinstance(stored, h5py.Dataset) and stored.shape is not None
        form = f"shape {stored.shape} of {stored.dtype}" if dense else "no dense array"
        raise DataError(
            f"{source}: expected a dense array of numbers in {' or '.join(wanted)}, got {form}{remedy}"
        )
    if stored.shape[0] != len(found) or not stored.shape[1]:
        raise DataError(
            f"{source}: expected {len(found):,} rows in {where}, got shape {stored.shape}{remedy}"
        )
    with _readable(f"{source}: {where}", remedy):
        return found, where, np.asarray(stored[:], np.float32), about


@contextmanager
def _readable(what: str, remedy: str = "") -> Iterator[None]:
    """Turn whatever reading a damaged file raises into one line."""
    try:
        yield
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{what} is missing or of another form{remedy}") from None
    except Exception as error:  # damaged bytes raise almost anything
        raise DataError(f"{what} cannot be read: {one_line(error)}{remedy}") from None


def write_scores(path: Path, datasets: Mapping[str, DatasetResult]) -> None:
    """Write every number of all rows to `path`, one per line."""
    with atomic_path(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for name, dataset in datasets.items():
            for task, result in dataset.tasks.items():
                for row in result.rows:
                    about = name, task, row.method.name, row.method.kind
                    writer.writerows((*about, *line) for line in _numbers(row))


def _numbers(row: Row) -> Iterator[tuple[str, str, int | str, float]]:
    """Column, statistic (mean, sd, repetition or value), number of the repetition, and value."""
    for column, score in row.scores.items():
        if score.mean is not None:
            yield column, "mean", "", score.mean
        if score.sd is not None:
            yield column, "sd", "", score.sd
        for number, value in enumerate(score.repetitions):
            yield column, "repetition", number, value
    for column, value in row.numbers.items():
        if isinstance(value, int | float):
            yield column, "value", "", value
