"""pyarrow, of the extra `arrow`, imported when a file needs it, and its tables as obs."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from cellmill.errors import ConfigError


def import_arrow(name: str = "pyarrow") -> Any:
    """The module `name` of pyarrow. Raises ConfigError if the extra is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"this input requires {name}, which is missing: pip install 'cellmill[arrow]'") from None


def as_obs(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Frame of cells `names`, with text, and what pandas has no type for, as categories of text."""
    made: dict[str, Any] = {}
    for name, column in frame.items():
        plain = isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf"
        text = column.astype(object).where(column.isna(), column.astype(str))
        made[str(name)] = column.to_numpy() if plain else pd.Categorical(text.where(text.notna(), None))
    return pd.DataFrame(made, index=pd.Index(names, dtype=object))
