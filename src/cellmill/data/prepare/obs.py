"""The cells that a dataset's filter keeps, and their obs columns.

Columns and labels get the names that later stages use. The table of datasets assigns obs columns to
roles (`batch`, `donor`, ...). Preprocessed cells have them under the name of the role, so that later
stages can name one column for all datasets. A different column that already has the name of a role is
kept as `ROLE_original`. Label maps then rename the labels.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from cellmill.config.corpus import IS_CONTROL, ORGANISM
from cellmill.config.datasets import (
    ObsColumns,
    filter_columns,
    filter_comparisons,
)
from cellmill.data.arrays import as_text, text_values
from cellmill.data.inputs.h5 import FrameColumns, one_line
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.prepare.label_maps import (
    EmptyLabels,
    MappedLabels,
    check_labels,
    remove_empty_labels,
)
from cellmill.data.prepare.perturbations import (
    Controls,
    Merged,
    TargetNames,
    find_guides,
    merge_names,
)
from cellmill.data.prepare.qc_lines import list_first
from cellmill.errors import DataError, require_known

_VALUES = 8  # values of a column in a message
_BOOLEANS = {"true": True, "false": False}


class ColumnNames(NamedTuple):
    """obs columns of preprocessed cells by their origin."""

    kept: list[str]  # columns of the file
    roles: list[str]  # roles that the table gives, `organism` and `is_control`
    labels: list[str]  # labels that are renamed or mapped
    originals: dict[str, str]  # new names of kept columns that have the name of a role or label


def name_columns(
    known: Iterable[str], keep_obs: list[str] | None, columns: ObsColumns, organism: bool
) -> ColumnNames:
    """Name the columns that preprocessed cells of a file with the columns `known` will have.

    With `organism` they have that column too.
    """
    changed: list[str] = []
    unchanged: list[str] = []
    for name, source in zip(columns.label_names, columns.labels):
        if source != name or name in columns.label_maps:
            changed.append(name)
        else:
            unchanged.append(name)
    kept = list(known) if keep_obs is None else list(dict.fromkeys([*keep_obs, *unchanged]))
    roles = list(columns.roles)
    if organism:
        roles.append(ORGANISM)
    if columns.control:
        roles.append(IS_CONTROL)
    taken = [role for role in roles if role in kept and columns.roles.get(role) != role]
    taken += [name for name in changed if name in kept]
    return ColumnNames(kept, roles, changed, {name: f"{name}_original" for name in taken})


class Treated(NamedTuple):
    """Perturbations or conditions of the cells of a file."""

    # perturbation or condition of each cell, one name for each combination of genes
    column: pd.Series
    texts: np.ndarray  # (cells,) text in the file, `nan` for a missing value
    merged: Merged
    controls: Controls | None  # None if the table names no control

    def report(self, cells: np.ndarray, depth: np.ndarray) -> dict[str, Any]:
        """Entries `perturbations` and `controls` of the QC report on the cells of mask `cells`."""
        entries = {}
        merged = self.merged.report(self.texts[cells])
        if merged:
            entries["perturbations"] = merged
        if self.controls is not None:
            entries["controls"] = self.controls.report(cells, depth)
        return entries


class ObsChoice(NamedTuple):
    """obs columns that preprocessing takes from a file."""

    keep: np.ndarray  # cells that the filter keeps; bool
    obs: pd.DataFrame  # all cells, with the columns to write
    mapped: dict[str, MappedLabels]  # labels with a map, by their name in the written cells
    empty: dict[str, EmptyLabels]  # labels with texts that mean none, likewise
    treated: Treated | None  # perturbations or conditions, if the table names a column

    def kept(self, cells: np.ndarray) -> FrameColumns:
        """obs of some cells (bool), categories without unused ones."""
        return FrameColumns(self.obs.index[cells], self._columns(cells))

    def _columns(self, cells: np.ndarray) -> Iterator[pd.Series]:
        for _, whole in self.obs.items():
            column = whole[cells]
            if isinstance(column.dtype, pd.CategoricalDtype):
                column = column.cat.remove_unused_categories()
            yield column

    def report(self, cells: np.ndarray, depth: np.ndarray) -> dict[str, Any]:
        """Entries of the QC report on the cells of mask `cells`; `depth` are counts of all cells.

        They are `labels` (label maps), `no_label`, `perturbations` and `controls`; absent if empty.
        """
        labels = {name: mapped.report(cells) for name, mapped in self.mapped.items()}
        no_label = {name: empty.report(cells) for name, empty in self.empty.items()}
        no_label = {name: counts for name, counts in no_label.items() if counts}
        entries = {"labels": labels, "no_label": no_label}
        entries = {key: entry for key, entry in entries.items() if entry}
        return entries if self.treated is None else entries | self.treated.report(cells, depth)


def choose_obs(
    reader: CountsReader,
    keep_obs: list[str] | None,
    columns: ObsColumns,
    organism: str | None = None,
    gene_organism: str | None = None,
) -> ObsChoice:
    """Evaluate the filter and name the roles. Reads no counts.

    `keep_obs` are columns to write in addition to labels and roles; None is all. `organism` is one
    more role, `gene_organism` the one whose genes perturbations name. Raises DataError when a
    column is missing, a dose is not a number, no cell has the control's value, or the filter keeps
    no cell.
    """
    for name in keep_obs or ():
        reader.obs_column(name, "preprocess.keep_obs")
    for name, owner in columns.read_columns.items():
        reader.obs_column(name, f"the dataset's {owner}")
    keep = _filter_cells(reader, columns.filter)
    names = name_columns(reader.obs, keep_obs, columns, organism is not None)
    for name in columns.label_names:
        if name in names.roles and (name in names.labels or name in names.originals):
            raise DataError(
                f"{reader.path}: label {name!r} is also a role, which the table gives to "
                f"{columns.roles.get(name)!r}; rename one of the columns, or set label_name"
            )
    for name, original in names.originals.items():
        if original in names.kept:
            raise DataError(
                f"{reader.path}: obs has {name!r} and {original!r}, and the table makes {name!r}; rename one"
            )
    new = {role: reader.obs[column] for role, column in columns.roles.items()}
    if organism is not None:
        new[ORGANISM] = pd.Series(pd.Categorical([organism] * reader.n_obs), index=reader.obs_names)
    if "dose" in new:
        new["dose"] = _parse_doses(reader, new["dose"])
    treated = None
    if columns.controlled is not None:
        treated = choose_controls(reader, columns, keep, gene_organism)
        new[columns.controlled] = treated.column
        if treated.controls is not None:
            new[IS_CONTROL] = pd.Series(treated.controls.is_control, index=reader.obs_names)
    mapped = _map_labels(reader, columns, names, new)
    empty = _remove_empty_labels(reader, columns, new)
    frame = reader.obs[names.kept].rename(columns=names.originals).assign(**new)
    return ObsChoice(keep, frame, mapped, empty, treated)


def _map_labels(
    reader: CountsReader, columns: ObsColumns, names: ColumnNames, new: dict[str, pd.Series]
) -> dict[str, MappedLabels]:
    """Add the labels that are renamed or mapped to `new`; return those with a map."""
    sources = dict(zip(columns.label_names, columns.labels))
    mapped = {}
    for name in names.labels:
        new[name] = reader.obs[sources[name]]
        label_map = columns.label_maps.get(name)
        if label_map is not None:
            written = reader.written_column(sources[name])
            known = map(as_text, written.dropna().unique())
            by_label = check_labels(Path(label_map), known, reader.path, sources[name])
            # a map may name a text that is read as a missing value
            codes, values = pd.factorize(written.where(new[name].notna() | written.isin(by_label)))
            texts = [as_text(value) for value in values]
            mapped[name] = MappedLabels(codes, texts, by_label)
            new[name] = pd.Series(mapped[name].column(), index=reader.obs_names)
    return mapped


def _remove_empty_labels(
    reader: CountsReader, columns: ObsColumns, new: dict[str, pd.Series]
) -> dict[str, EmptyLabels]:
    """Add the labels with texts that mean none to `new`, without these; return the texts."""
    removed = {}
    for name, column in zip(columns.label_names, columns.labels):
        labels = new[name] if name in new else reader.obs[column]
        cleaned, empty = remove_empty_labels(labels, columns)
        if empty is not None:
            new[name] = cleaned
            removed[name] = empty
    return removed


def choose_controls(
    reader: CountsReader, columns: ObsColumns, keep: np.ndarray, organism: str | None
) -> Treated:
    """Perturbations, or else conditions, under one name each, and the control cells.

    Raises DataError for a control that no cell of `keep` has.
    """
    source = reader.obs[columns.roles[str(columns.controlled)]]
    missing = source.isna().to_numpy()
    texts = text_values(source, missing="nan")  # a table can name missing values as controls
    written = text_values(reader.written_column(str(source.name)), missing="nan")
    values = columns.controls_in({*written[keep]})
    texts = np.where(np.isin(written.astype(str), values), written, texts)
    present = {*texts[keep]}
    for control in values:
        fault = (
            f"{reader.path}: no {control!r} (the dataset's control) in obs column {source.name!r}"
        )
        require_known(control, sorted(present), fault)
    merged = merge_names(texts, values, TargetNames.read(reader, organism))
    names = np.array([merged.names[text] for text in texts], object)
    column = source
    if (names != texts).any() or (missing & (texts != "nan")).any():
        names[missing & (names == "nan")] = None
        column = pd.Series(pd.Categorical(names), index=source.index)
    controls = None
    if values:
        is_control = np.isin(texts.astype(str), values) | (names == values[0])
        is_perturbed = ~is_control & ~missing
        perturbation = names.copy()
        perturbation[~is_perturbed] = None
        guides = find_guides(reader.obs, perturbation, columns.guide)
        controls = Controls(is_control, is_perturbed, texts, guides)
    return Treated(column, texts, merged, controls)


def _filter_cells(reader: CountsReader, condition: str | None) -> np.ndarray:
    if condition is None:
        return np.ones(reader.n_obs, bool)
    columns = {name: _comparable(reader.written_column(name)) for name in filter_columns(condition)}
    _read_numbers(reader, condition, columns)
    kinds = ", ".join(f"{name} is {column.dtype}" for name, column in columns.items())
    try:
        keep = pd.DataFrame(columns).eval(
            condition.strip(), engine="python", local_dict={}, global_dict={}
        )
    except Exception as error:  # pandas raises errors of many kinds for what it does not compare
        raise DataError(
            f"{reader.path}: filter {condition!r}: {one_line(error)}; {kinds}"
        ) from None
    if not isinstance(keep, pd.Series) or keep.dtype.kind != "b":
        raise DataError(
            f"{reader.path}: filter {condition!r} is not a condition: {kinds}; compare it with a value"
        )
    if not keep.any():
        values = "; ".join(f"{name} is {_examples(column)}" for name, column in columns.items())
        raise DataError(
            f"{reader.path}: filter {condition!r} keeps none of {reader.n_obs:,} cells: {values}"
        )
    return keep.to_numpy(bool, na_value=False)


def _read_numbers(reader: CountsReader, condition: str, columns: dict[str, pd.Series]) -> None:
    """Replace `columns` of text that a filter compares with numbers or booleans by such.

    Raises DataError if they are none: to pandas, each text differs from each number.
    """
    comparisons = [*filter_comparisons(condition)]
    for is_read in (False, True):
        for names, values in comparisons:
            is_text = {repr(value): isinstance(value, str) for value in values}
            is_text |= {name: not is_numeric_dtype(columns[name]) for name in names}
            if len({*is_text.values()}) < 2:
                continue
            if is_read:
                kinds = [f"{name} ({'text' if is_text[name] else 'number'})" for name in is_text]
                raise DataError(
                    f"{reader.path}: filter {condition!r} compares {' with '.join(kinds)}; write texts in quotes, "
                    "and numbers, True and False without"
                )
            for name in filter(is_text.get, names):
                columns[name] = _as_numbers(columns[name], reader.obs[name])


def _as_numbers(written: pd.Series, column: pd.Series) -> pd.Series:
    """The numbers or booleans that the texts of a column say; `written` if a text says none."""
    codes, values = pd.factorize(column)
    texts = [_BOOLEANS.get(text.lower(), text) for text in map(as_text, values)]
    numbers = pd.to_numeric(pd.Series(texts, dtype=object), errors="coerce")
    if numbers.isna().any():
        return written
    if (codes < 0).any():  # booleans without a value would be objects
        numbers = numbers.astype(np.float64)
    return numbers.reindex(codes).set_axis(column.index)


def _comparable(column: pd.Series) -> pd.Series:
    """Return categories of numbers or booleans as plain values, which can be compared and joined."""
    if isinstance(column.dtype, pd.CategoricalDtype) and not column.isna().any():
        values = column.cat.categories.dtype
        return column.astype(values) if is_numeric_dtype(values) else column
    return column


def _parse_doses(reader: CountsReader, column: pd.Series) -> pd.Series:
    numbers = pd.to_numeric(column.astype(object), errors="coerce").astype(np.float64)
    wrong = numbers.isna() & column.notna()
    if wrong.any():
        raise DataError(
            f"{reader.path}: obs column {column.name!r} (the dataset's dose) expected numbers, got "
            f"{str(column[wrong].iloc[0])!r}; name a column of numbers"
        )
    return numbers


def _examples(column: pd.Series) -> str:
    values = sorted(map(str, column.dropna().unique()))
    return list_first([*map(repr, values)], _VALUES) or "empty"
