"""Text of obs and var, the same with pandas 2 and 3 and with anndata 0.12 and 0.13.

pandas 3 stores text as `str`, keeps missing values in `astype(str)`, where pandas 2 made `nan` of them, and anndata
writes `str` as a group of values and a mask, which 0.12 refuses and shards of earlier versions do not have.
"""

from typing import Any

import numpy as np
import pandas as pd


def text_values(column: pd.Series, missing: str = "") -> np.ndarray:
    """Values of a column as str, `(cells,)` object, and `missing` where there is none."""
    codes, values = pd.factorize(column)
    texts = pd.Series(values).astype(str).to_numpy(object)
    return np.array([*texts, missing], object)[codes]


def text_index(index: pd.Index) -> pd.Index:
    """An index of str, of dtype object; a missing name is `nan`."""
    texts = index.astype(str).astype(object)
    return texts.fillna("nan") if texts.hasnans else texts


def plain_text(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with text of dtype object in its index, columns and categories; columns with missing text are
    categories."""
    made = {name: _plain(frame[name]) for name in frame.columns if _is_text(frame[name])}
    frame = frame.assign(**made) if made else frame
    return frame.set_axis(_plain_index(frame.index), axis=0)


def _is_text(column: pd.Series) -> bool:
    if isinstance(column.dtype, pd.CategoricalDtype):
        return isinstance(column.cat.categories.dtype, pd.StringDtype)
    return isinstance(column.dtype, pd.StringDtype) or (column.dtype == object and bool(column.isna().any()))


def _plain(column: pd.Series) -> Any:
    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.cat.rename_categories(_plain_index(column.cat.categories))
    if not column.isna().any():
        return column.astype(object)
    codes, values = pd.factorize(column.astype(object).map(str, na_action="ignore"), sort=True)
    return pd.Categorical.from_codes(codes, pd.Index(values, dtype=object))


def _plain_index(index: pd.Index) -> pd.Index:
    return index.astype(object) if isinstance(index.dtype, pd.StringDtype) else index
