"""Cells that a dataset's filter keeps, and its obs columns under the names that later stages know.

The table of datasets names obs columns by role (`batch`, `donor`, ...), whatever each file calls them. Preprocessed
cells have them under the name of the role, so that splits, covariates, batch terms and tasks can name one column for
all datasets. A column of the file that has the name of a role and is not it is kept as `ROLE_original`.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cellmill.config.corpus import IS_CONTROL, ORGANISM, ObsColumns
from cellmill.config.obs_filter import parse_filter
from cellmill.data.counts_reader import CountsReader
from cellmill.data.h5_file import one_line
from cellmill.data.mapped_labels import MappedLabels, map_labels
from cellmill.data.text_columns import text_values
from cellmill.errors import DataError, did_you_mean

_VALUES = 8  # of a column, in a message


class ObsChoice(NamedTuple):
    """obs columns that preprocessing takes from a file."""

    keep: np.ndarray  # cells that the filter keeps; bool
    obs: pd.DataFrame  # all cells, with the columns to write
    mapped: dict[str, MappedLabels]  # labels with a map, by their name in the written cells

    def kept(self, cells: np.ndarray) -> pd.DataFrame:
        """obs of some cells (bool), categories without unused ones."""
        frame = self.obs.loc[cells].copy()
        for name in frame.select_dtypes("category"):
            frame[name] = frame[name].cat.remove_unused_categories()
        return frame

    def label_report(self, cells: np.ndarray) -> dict[str, Any]:
        """Entry `labels` of the QC report, on some cells (bool); empty without label maps."""
        reports = {name: mapped.report(cells) for name, mapped in self.mapped.items()}
        return {"labels": reports} if reports else {}


def choose_obs(
    reader: CountsReader, keep_obs: list[str] | None, columns: ObsColumns, organism: str | None = None
) -> ObsChoice:
    """Evaluate the filter and name the roles. Reads no counts.

    `keep_obs` are columns to write beside labels and roles; None is all. `organism` is one more role. Raises DataError
    when a column is missing, a dose is no number, no cell has the control's value, or the filter keeps no cell.
    """
    for name in keep_obs or ():
        reader.obs_column(name, "preprocess.keep_obs")
    for name, owner in columns.asked_for.items():
        reader.obs_column(name, f"the dataset's {owner}")
    keep = _kept_cells(reader, columns.filter)
    mapped = {
        name: map_labels(reader.obs[label], Path(columns.label_maps[name]), reader.path)
        for label, name in zip(columns.labels, columns.label_names)
        if name in columns.label_maps
    }
    labels = {name: label for label, name in zip(columns.labels, columns.label_names)}
    made = {name: reader.obs[label] for name, label in labels.items() if name != label}
    made |= {name: pd.Series(own.column, index=reader.obs.index) for name, own in mapped.items()}
    as_they_are = [name for name in labels if name not in made]
    names = [*reader.obs.columns] if keep_obs is None else list(dict.fromkeys([*keep_obs, *as_they_are]))
    return ObsChoice(keep, _with_roles(reader, names, columns, keep, organism, made), mapped)


def _kept_cells(reader: CountsReader, condition: str | None) -> np.ndarray:
    if condition is None:
        return np.ones(reader.n_obs, bool)
    parsed = parse_filter(condition)
    frame = pd.DataFrame({f"c{i}": _comparable(reader.obs[name]) for i, name in enumerate(parsed.columns)})
    try:
        # the condition is written anew by `parse_filter`, and engine `python` is pandas' own evaluator
        keep = frame.eval(parsed.expression, engine="python", local_dict={}, global_dict={})
    # NotImplementedError: pandas has comparisons that it does not evaluate
    except (TypeError, ValueError, NotImplementedError) as error:
        kinds = ", ".join(f"{name} is {reader.obs[name].dtype}" for name in parsed.columns)
        raise DataError(f"{reader.path}: filter {condition!r}: {one_line(error)}; {kinds}") from None
    if not isinstance(keep, pd.Series) or keep.dtype.kind != "b":
        raise DataError(
            f"{reader.path}: filter {condition!r} is no condition: {parsed.columns[0]} is "
            f"{reader.obs[parsed.columns[0]].dtype}; compare it with a value"
        )
    if not keep.any():
        values = "; ".join(f"{name} is {_examples(reader.obs[name])}" for name in parsed.columns)
        raise DataError(f"{reader.path}: filter {condition!r} keeps none of {reader.n_obs:,} cells: {values}")
    return keep.to_numpy(bool, na_value=False)


def _comparable(column: pd.Series) -> pd.Series:
    """Categories of numbers or booleans as such: they have no order, and join with no condition."""
    if isinstance(column.dtype, pd.CategoricalDtype) and not column.isna().any():
        values = column.cat.categories.dtype
        return column.astype(values) if pd.api.types.is_numeric_dtype(values) else column
    return column


def _with_roles(
    reader: CountsReader,
    names: list[str],
    columns: ObsColumns,
    keep: np.ndarray,
    organism: str | None,
    labels: dict[str, pd.Series],
) -> pd.DataFrame:
    """obs with roles and `labels`, those that are renamed, under their names."""
    made = {role: reader.obs[column] for role, column in columns.roles.items()}
    if organism is not None:
        made[ORGANISM] = pd.Series(pd.Categorical([organism] * reader.n_obs), index=reader.obs.index)
    if "dose" in made:
        made["dose"] = _numbers(reader, made["dose"])
    if columns.control is not None:
        assert columns.controlled is not None
        made[IS_CONTROL] = _is_control(reader, made[columns.controlled], columns.control, keep)
    frame = reader.obs[names].copy()
    taken = {role: f"{role}_original" for role in made if role in names and columns.roles.get(role) != role}
    if both := [name for name in columns.label_names if name in taken or (name in made and name in labels)]:
        raise DataError(
            f"{reader.path}: label {both[0]!r} is also a role, which the table gives to "
            f"{columns.roles.get(both[0])!r}; rename one of the columns, or set label_name"
        )
    made |= labels
    taken |= {name: f"{name}_original" for name in labels if name in names}
    for role, name in taken.items():
        if name in frame:
            raise DataError(f"{reader.path}: obs has {role!r} and {name!r}, and the table makes {role!r}; rename one")
    return frame.rename(columns=taken).assign(**made)


def _numbers(reader: CountsReader, column: pd.Series) -> pd.Series:
    numbers = pd.to_numeric(column.astype(object), errors="coerce").astype(np.float64)
    if (wrong := numbers.isna() & column.notna()).any():
        raise DataError(
            f"{reader.path}: obs column {column.name!r} (the dataset's dose) expected numbers, got "
            f"{str(column[wrong].iloc[0])!r}; name a column of numbers"
        )
    return numbers


def _is_control(reader: CountsReader, column: pd.Series, control: str, keep: np.ndarray) -> pd.Series:
    is_control = pd.Series(text_values(column, missing="nan") == control, index=column.index)
    if not is_control[keep].any():
        known = [str(value) for value in column[keep].dropna().unique()]
        raise DataError(
            f"{reader.path}: no cell has {control!r} (the dataset's control) in obs column {column.name!r}; "
            f"{did_you_mean(control, sorted(known)[:_VALUES])}"
        )
    return is_control


def _examples(column: pd.Series) -> str:
    values = column.dropna().unique()
    shown = ", ".join(repr(str(value)) for value in sorted(values, key=str)[:_VALUES])
    return f"{shown}{f' and {len(values) - _VALUES:,} more' if len(values) > _VALUES else ''}" or "empty"
