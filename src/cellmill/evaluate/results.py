"""Result files of evaluations: embeddings and predictions in .h5ad files, and scores.csv.

Embeddings and predictions are written to a file of their own or added to a copy of the cells' file. Embeddings by
models of other packages are read from obsm["X_emb"], or X, of an .h5ad with the same cells in the same order.
scores.csv has every number of all tables of an evaluation, one per line.
"""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
from anndata.io import read_elem, write_elem

from cellmill.data.arrays import plain_text
from cellmill.data.inputs.h5 import create_h5, one_line, open_h5, write_anndata
from cellmill.errors import DataError
from cellmill.evaluate.predict import ABOUT_PREDICTION, LABEL, PROBABILITIES, PROBABILITY, VALUE, Predicted
from cellmill.files import atomic_path

KEY = "X_cellmill"  # key in obsm
ABOUT = "cellmill"  # key in uns
AGAIN = "run embed again"
COST = ("seconds", "peak_gb")  # keys in uns["cellmill"]


def write_embedding(path: Path, obs: pd.DataFrame, vectors: np.ndarray, about: dict[str, Any]) -> None:
    """Write `obs`, obsm["X_cellmill"] and uns["cellmill"] to an .h5ad without X. Atomic; OSError names `path`."""
    adata = ad.AnnData(obs=obs, obsm={KEY: vectors}, uns={ABOUT: about})
    with create_h5(path) as file:  # anndata's own writer crashes the interpreter when the disk is full
        write_anndata(file, adata)


def append_embedding(source: Path, out: Path, vectors: np.ndarray, about: dict[str, Any]) -> None:
    """Write a copy of the .h5ad `source` with obsm["X_cellmill"] and uns["cellmill"] added or replaced.

    `out` may be `source` itself. Atomic, and so takes the size of `source` on disk; OSError names `out`.
    """
    with create_h5(out, copy_of=source) as file:
        put(file, "obsm", KEY, vectors)
        put(file, "uns", ABOUT, about)


def put(file: h5py.File, group: str, key: str, value: Any) -> None:
    """Write an entry of obsm or uns of an open .h5ad, in place of an earlier one."""
    if group not in file:
        write_elem(file, group, {})
    write_elem(file[group], key, value)


def read_embedding(path: Path, names: pd.Index, model_digest: str, width: int | None) -> np.ndarray:
    """Vectors of a file written by `write_embedding`, `(cells, width)` float32; a row is finite, or all NaN.

    None is any width.

    Raises DataError when the file is of another model, or its obs names are not `names` in this order.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file; run embed first")
    with open_h5(path, AGAIN) as file:
        try:
            stored, digest = file["obsm"][KEY], str(read_elem(file["uns"][ABOUT]["model_digest"]))
            own = pd.Index(read_elem(file["obs"][file["obs"].attrs["_index"]])).astype(str)
            shape, dtype = stored.shape, stored.dtype
        except (KeyError, TypeError, AttributeError):
            raise DataError(
                f"{path}: not an embedding by cellmill: obsm[{KEY!r}] or uns[{ABOUT!r}] is missing"
            ) from None
        except Exception as error:  # damaged bytes raise almost anything
            raise _unreadable(path, error) from None
        if digest != model_digest:
            raise DataError(f"{path}: made by model {digest[:12]}, expected {model_digest[:12]}; {AGAIN}")
        _check_cells(path, own, names)
        if len(shape) != 2 or shape != (len(names), width or shape[1]) or dtype.kind != "f":
            expected = f"{len(names):,} rows of" if width is None else f"{len(names):,} x {width:,}"
            raise DataError(
                f"{path}: obsm[{KEY!r}]: expected {expected} numbers, got shape {shape} of {dtype}; {AGAIN}"
            )
        try:
            vectors = np.asarray(stored[:], np.float32)
        except Exception as error:
            raise _unreadable(path, error) from None
    finite = np.isfinite(vectors)
    if (wrong := finite.any(axis=1) != finite.all(axis=1)).any() or (wrong := np.isinf(vectors).any(axis=1)).any():
        raise DataError(f"{path}: cell {int(wrong.argmax()) + 1:,} has numbers that are not finite; {AGAIN}")
    return vectors


def read_cost(path: Path) -> dict[str, float] | None:
    """`seconds` and `peak_gb` of the stage that wrote an embedding; None where they were not measured yet."""
    with open_h5(path, AGAIN) as file:
        about = file["uns"][ABOUT]
        if not {*COST} <= {*about}:
            return None
        return {name: float(read_elem(about[name])) for name in COST}


def read_coverage(path: Path) -> float | None:
    """Share of the counts on genes that the model knows; None where it was not stored."""
    with open_h5(path, AGAIN) as file:
        about = file["uns"][ABOUT]
        return float(read_elem(about["coverage_frac"])) if "coverage_frac" in about else None


def _check_cells(path: Path, own: pd.Index, names: pd.Index) -> None:
    if len(own) != len(names) or not (own == names).all():
        at = next((i for i, (a, b) in enumerate(zip(own, names)) if a != b), min(len(own), len(names)))
        raise DataError(
            f"{path}: other cells than expected: {len(own):,} instead of {len(names):,}, the first difference at cell "
            f"{at + 1:,}; {AGAIN}"
        )


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: cannot be read: {one_line(error)}; {AGAIN}")


EXTERNAL_KEY = "X_emb"  # key in obsm


def read_external(path: Path, names: pd.Index, command: str) -> np.ndarray:
    """Vectors `(cells, width)` float32, finite. Raises DataError, beginning with `command`, for anything else."""
    if not path.exists():
        raise DataError(f"{command}: it ended well and wrote no file to {{out}}")
    with open_h5(path, command) as file:
        try:
            own = pd.Index(read_elem(file["obs"][file["obs"].attrs["_index"]])).astype(str)
            has_key = EXTERNAL_KEY in file.get("obsm", {})
            stored = file["obsm"][EXTERNAL_KEY] if has_key else file.get("X")
        except Exception as error:  # damaged bytes raise almost anything
            raise DataError(f"{command}: what it wrote is no AnnData: {one_line(error)}") from None
        where = f"obsm[{EXTERNAL_KEY!r}]" if has_key else "X"
        _check_external_cells(own, names, command)
        if not isinstance(stored, h5py.Dataset) or stored.ndim != 2 or stored.dtype.kind not in "fiu":
            form = f"shape {stored.shape} of {stored.dtype}" if isinstance(stored, h5py.Dataset) else "no dense array"
            raise DataError(f"{command}: expected a dense array of numbers in obsm[{EXTERNAL_KEY!r}] or X, got {form}")
        if stored.shape[0] != len(names) or not stored.shape[1]:
            raise DataError(f"{command}: expected {len(names):,} rows in {where}, got shape {stored.shape}")
        try:
            vectors = np.asarray(stored[:], np.float32)
        except Exception as error:
            raise DataError(f"{command}: {where} of what it wrote cannot be read: {one_line(error)}") from None
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise DataError(
            f"{command}: {int((~finite).sum()):,} cells have numbers in {where} that are not finite, the first is "
            f"{names[int((~finite).argmax())]!r}; expected an embedding of every cell"
        )
    return vectors


def _check_external_cells(own: pd.Index, names: pd.Index, command: str) -> None:
    if len(own) == len(names) and (own == names).all():
        return
    at = next((i for i, (a, b) in enumerate(zip(own, names)) if a != b), min(len(own), len(names)))
    there, here = (repr(index[at]) if at < len(index) else "no cell" for index in (own, names))
    raise DataError(
        f"{command}: expected the {len(names):,} cells of {{cells}} in their order, got {len(own):,}; the first that "
        f"differs is cell {at + 1:,}, {there} instead of {here}"
    )


FIELDS = ("dataset", "task", "name", "kind", "column", "statistic", "repetition", "value")
STATISTICS = ("mean", "sd", "repetitions")
"""Endings of the keys of rows; other keys are single values."""


def write_scores(path: Path, datasets: Mapping[str, Any]) -> None:
    """Write the rows of `datasets`, that of metrics.json, to `path`."""
    with atomic_path(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows(_lines(datasets))


def _lines(datasets: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for dataset, entry in datasets.items():
        for task, result in entry["tasks"].items():
            for row in result["rows"]:
                about = dataset, task, row["name"], row.get("kind", "")
                for key, value in row.items():
                    if key not in ("name", "kind"):
                        yield from ((*about, *line) for line in _values(key, value))


def _values(key: str, value: Any) -> Iterator[tuple[Any, ...]]:
    """Column, statistic, repetition and value; nothing for what is no number."""
    column, _, ending = key.rpartition("_")
    column, statistic = (column, ending) if column and ending in STATISTICS else (key, "value")
    for repetition, one in enumerate(value if isinstance(value, list) else [value]):
        if isinstance(one, int | float):
            yield column, statistic.removesuffix("s"), repetition if isinstance(value, list) else "", one


def write_prediction(path: Path, obs: pd.DataFrame, predicted: Predicted) -> None:
    """Write `obs` with the predictions to an .h5ad without X. Atomic; OSError names `path`."""
    adata = ad.AnnData(obs=obs.assign(**predicted.obs), obsm=predicted.obsm, uns={ABOUT_PREDICTION: predicted.about})
    with create_h5(path) as file:
        write_anndata(file, adata)


def append_prediction(source: Path, out: Path, predicted: Predicted) -> None:
    """Write a copy of the .h5ad `source` with the predictions added or replaced; `out` may be `source`.

    Atomic, and so takes the size of `source` on disk; OSError names `out`.
    """
    with create_h5(out, copy_of=source) as file:
        obs = file["obs"]
        if not isinstance(obs, h5py.Group):
            raise DataError(
                f"{source}: its obs is of an AnnData before 0.7; read and write it once, or leave out --append"
            )
        _remove_others(file, obs, predicted)
        for name, column in plain_text(pd.DataFrame(predicted.obs)).items():
            write_elem(obs, name, column.array if isinstance(column.dtype, pd.CategoricalDtype) else column.to_numpy())
        order = [name for name in obs.attrs["column-order"] if name not in predicted.obs and name in obs]
        obs.attrs["column-order"] = np.array([*order, *predicted.obs], dtype=h5py.string_dtype())
        for name, table in predicted.obsm.items():
            put(file, "obsm", name, table)
        put(file, "uns", ABOUT_PREDICTION, predicted.about)


def _remove_others(file: h5py.File, obs: h5py.Group, predicted: Predicted) -> None:
    """Remove what a model with other heads predicted: beside this model's digest it would pass for its own."""
    for name in [name for name in obs if name.startswith((LABEL, PROBABILITY, VALUE)) and name not in predicted.obs]:
        del obs[name]
    for name in [name for name in file.get("obsm", ()) if name.startswith(PROBABILITIES)]:
        if name not in predicted.obsm:
            del file["obsm"][name]
