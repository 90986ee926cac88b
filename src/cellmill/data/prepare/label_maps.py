"""Labels of cells: the maps that rename them, and texts that mean no label."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cellmill.config.datasets import ObsColumns, read_rows
from cellmill.data.arrays import as_text
from cellmill.errors import ConfigError, require_known


class MappedLabel(NamedTuple):
    """One line of the file; `to` is None if cells of the label get none."""

    line: int
    to: str | None


def read_label_map(path: Path) -> dict[str, MappedLabel]:
    """Lines of a label map by `from`, in order. Raise ConfigError naming file and line."""
    labels: dict[str, MappedLabel] = {}
    for line, row in read_rows(path, ("from", "to"), "a label map", required=("from", "to")):
        if "from" not in row:
            raise ConfigError(
                f"{path}, line {line}: expected a label in column from, got none; fill it in"
            )
        label = row["from"]
        if label in labels:
            raise ConfigError(
                f"{path}, line {line}: {label!r} is also in line {labels[label].line}; remove one"
            )
        labels[label] = MappedLabel(line, row.get("to"))
    if not labels:
        raise ConfigError(
            f"{path}: no labels; add a line with the columns from and to for each label to rename"
        )
    return labels


class MappedLabels(NamedTuple):
    """A label of all cells of a file, before and after its map."""

    codes: np.ndarray  # (cells,) index into `before`, -1 for a missing value
    before: list[str]
    by_label: dict[str, MappedLabel]

    def column(self) -> pd.Categorical:
        """(cells,): labels after the map."""
        after = []
        for label in self.before:
            after.append(self.by_label[label].to if label in self.by_label else label)
        return pd.Categorical(np.array([*after, None], object)[self.codes])

    def report(self, cells: np.ndarray) -> dict[str, Any]:
        """Count the cells of mask `cells` by label, for labels that are renamed, kept and made missing."""
        report: dict[str, Any] = {"renamed": {}, "kept": {}, "made_missing": {}}
        for label, n in _count_codes(self.codes[cells], self.before).items():
            mapped = self.by_label.get(label)
            if mapped is None:
                report["kept"][label] = n
            elif mapped.to is None:
                report["made_missing"][label] = n
            else:
                report["renamed"][label] = n
        return report


def _count_codes(codes: np.ndarray, texts: list[str]) -> dict[str, int]:
    """Number of each text, the most frequent first; -1 is no text."""
    n_cells = np.bincount(codes[codes >= 0], minlength=len(texts)).tolist()
    counts = {text: n for text, n in zip(texts, n_cells) if n}
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def check_labels(
    label_map: Path, labels: Iterable[str], file: Path, column: str
) -> dict[str, MappedLabel]:
    """Read a label map. Raises DataError for a line whose label is not in `labels` of the file."""
    known = sorted({*labels})
    by_label = read_label_map(label_map)
    for label, mapped in by_label.items():
        fault = f"{label_map}, line {mapped.line}: no cell of {file} has label {label!r} in obs column {column!r}"
        require_known(label, known, fault)
    return by_label


class EmptyLabels(NamedTuple):
    """Texts of a label that mean no label, and the cells that had them."""

    codes: np.ndarray  # (cells,) index into `texts`, -1 for other cells
    texts: list[str]

    def report(self, cells: np.ndarray) -> dict[str, int]:
        """Number of the cells of mask `cells` by text, the most frequent first."""
        return _count_codes(self.codes[cells], self.texts)


def remove_empty_labels(
    labels: pd.Series, columns: ObsColumns
) -> tuple[pd.Series, EmptyLabels | None]:
    """Labels with missing values for texts that mean no label, and these texts, if there are any."""
    codes, values = pd.factorize(labels)
    texts = [as_text(value) for value in values]
    # `none` may be a control of a perturbation that is also a label
    controls = columns.controls_in(texts)
    empty = []  # codes
    for code, text in enumerate(texts):
        is_text = isinstance(values[code], str)
        if is_text and text not in controls and columns.means_no_label(text):
            empty.append(code)
    if not empty:
        return labels, None
    position = np.full(len(values) + 1, -1, np.int64)  # the last is for missing values
    position[empty] = np.arange(len(empty))
    removed = EmptyLabels(position[codes], [texts[code] for code in empty])
    kept = np.array([*texts, None], object)[np.where(removed.codes >= 0, -1, codes)]
    return pd.Series(pd.Categorical(kept), index=labels.index), removed
