"""A label map: a tab-separated file with the columns `from` and `to`, which renames labels of a dataset. Torch-free."""

from pathlib import Path
from typing import NamedTuple

from cellmill.config.table import read_rows
from cellmill.errors import ConfigError


class MappedLabel(NamedTuple):
    """One line of the file."""

    line: int
    to: str | None  # None: cells of the label have none


def read_label_map(path: Path) -> dict[str, MappedLabel]:
    """Lines of a label map by `from`, in order. Raises ConfigError naming file and line."""
    labels: dict[str, MappedLabel] = {}
    for line, row in read_rows(path, ("from", "to"), "a label map", required=("from", "to")):
        if "from" not in row:
            raise ConfigError(f"{path}, line {line}: expected a label in column from, got none; fill it in")
        if (label := row["from"]) in labels:
            raise ConfigError(
                f"{path}, line {line}: {label!r} is also in line {labels[label].line}; remove one of them"
            )
        labels[label] = MappedLabel(line, row.get("to"))
    if not labels:
        raise ConfigError(f"{path}: no labels; add a line with the columns from and to for each label to rename")
    return labels
