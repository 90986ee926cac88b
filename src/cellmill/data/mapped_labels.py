"""Labels of a dataset, renamed by its label maps."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cellmill.config.label_map import MappedLabel, read_label_map
from cellmill.data.obs_levels import text_of
from cellmill.errors import DataError, did_you_mean


@dataclass(frozen=True)
class MappedLabels:
    """A label of all cells of a file, before and after its map."""

    codes: np.ndarray  # (cells,) index into `before`, -1 for a missing value
    before: list[str]
    by_label: dict[str, MappedLabel]

    @property
    def column(self) -> pd.Categorical:
        """(cells,): labels after the map."""
        texts = [self.by_label[label].to if label in self.by_label else label for label in self.before]
        names = sorted({text for text in texts if text is not None})
        table = np.array([*(-1 if text is None else names.index(text) for text in texts), -1], np.int64)
        return pd.Categorical.from_codes(table[self.codes], categories=names)

    def report(self, cells: np.ndarray) -> dict[str, Any]:
        """Number of the cells `cells`, bool, by label: of renamed ones, of others, and of those made missing."""
        of_cells = self.codes[cells]
        n_cells = np.bincount(of_cells[of_cells >= 0], minlength=len(self.before)).tolist()
        counts = {label: n for label, n in sorted(zip(self.before, n_cells), key=lambda one: (-one[1], one[0])) if n}
        gone = [label for label in counts if label in self.by_label and self.by_label[label].to is None]
        return {
            "renamed": {label: n for label, n in counts.items() if label in self.by_label and label not in gone},
            "kept": {label: n for label, n in counts.items() if label not in self.by_label},
            "made_missing": {label: counts[label] for label in gone},
        }


def map_labels(column: pd.Series, label_map: Path, file: Path) -> MappedLabels:
    """Rename the labels of an obs column of `file`. Raises ConfigError or DataError naming the map and the line."""
    by_label = read_label_map(label_map)
    codes, values = pd.factorize(column)
    texts = [text_of(value) for value in values]
    check_labels(label_map, texts, file, str(column.name), by_label)
    return MappedLabels(codes, texts, by_label)


def check_labels(
    label_map: Path, labels: Iterable[str], file: Path, column: str, by_label: dict[str, MappedLabel] | None = None
) -> None:
    """Raise DataError for a line of the map whose label is none of `labels`, those of the file."""
    known = sorted({*labels})
    for label, mapped in (by_label or read_label_map(label_map)).items():
        if label not in known:
            raise DataError(
                f"{label_map}, line {mapped.line}: no cell of {file} has label {label!r} in obs column {column!r}; "
                f"{did_you_mean(label, known)}"
            )


def sentence(name: str, report: dict[str, Any], most: int = 20) -> str:
    """What a map did to the kept cells, for the log."""

    def cells(counts: dict[str, int]) -> str:
        shown = ", ".join(f"{label!r} {n:,}" for label, n in [*counts.items()][:most])
        more = f" and {len(counts) - most:,} more" if len(counts) > most else ""
        return f"{sum(counts.values()):,} cells of {len(counts):,} labels" + (f" ({shown}{more})" if counts else "")

    renamed = f"{sum(report['renamed'].values()):,} cells of {len(report['renamed']):,} labels"
    words = f"label {name}: renamed {renamed}; left as they are {cells(report['kept'])}"
    return words + (f"; without a label now {cells(report['made_missing'])}" if report["made_missing"] else "")
