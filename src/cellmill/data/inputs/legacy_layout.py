"""obs and var as anndata before 0.7 stored them: one compound dataset, categories in uns."""

from typing import Any

import numpy as np
import pandas as pd


def read_table(file: Any, name: str) -> pd.DataFrame:
    """The data frame stored as the compound dataset `name`; field `index` (else the first) is its index."""
    records = file[name][()]
    if records.dtype.names is None:
        raise ValueError("expected a data frame, got an array without fields")
    columns = {field: _decoded(records[field]) for field in records.dtype.names}
    index = "index" if "index" in columns else "_index" if "_index" in columns else records.dtype.names[0]
    names = columns.pop(index)
    for field, codes in columns.items():
        categories = file.get(f"uns/{field}_categories")
        if categories is not None and np.issubdtype(codes.dtype, np.integer):
            columns[field] = pd.Categorical.from_codes(codes, _decoded(categories[()]))
    return pd.DataFrame(columns, index=pd.Index(names, dtype=object))


def _decoded(values: Any) -> np.ndarray:
    """Values with text as str."""
    values = np.atleast_1d(values)
    if values.dtype.kind not in "SO":
        return values.astype(values.dtype.newbyteorder("="))
    return np.array([v.decode() if isinstance(v, bytes) else v for v in values.tolist()], dtype=object)
