"""Embeddings in .h5ad files: written beside the cells or added to a copy of their file, and read back."""

from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
from anndata.io import read_elem, write_elem

from cellmill.data.counts_writer import write_anndata
from cellmill.data.h5_file import change_h5, create_h5, one_line, open_h5
from cellmill.errors import DataError

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
    with change_h5(out, source) as file:
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
