"""umap.tsv: coordinates of drawn cells of all datasets."""

import csv
import io
from math import isfinite
from pathlib import Path
from typing import Any

from cellmill.errors import DataError
from cellmill.files import require_file, write_text

COLUMNS = ("dataset", "obs_name", "label", "x", "y", "heldout", "batch")
EARLIER = COLUMNS[:-1]
"""Columns of earlier versions, which are read too."""


def write_umap(path: Path, rows: list[tuple[Any, ...]]) -> None:
    """Write `rows`, one value per column, as tab-separated text."""
    text = io.StringIO()
    csv.writer(text, delimiter="\t", lineterminator="\n").writerows([COLUMNS, *rows])
    write_text(path, text.getvalue())


def read_umap(path: Path) -> list[dict[str, str]]:
    """Rows as text by column; none when the file is absent. Raises DataError for anything that `write_umap` does not
    write."""
    if not path.exists():
        return []
    require_file(path)
    try:
        with open(path, newline="", encoding="utf-8") as file:
            head, *rows = csv.reader(file, delimiter="\t")
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path}: not a table ({error}); run evaluate again") from None
    if tuple(head) not in (COLUMNS, EARLIER):
        raise DataError(f"{path}: expected the columns {', '.join(COLUMNS)}; run evaluate again")
    if wrong := [number for number, row in enumerate(rows, start=2) if not _is_point(row, len(head))]:
        raise DataError(f"{path}, row {wrong[0]}: expected {', '.join(COLUMNS)}; run evaluate again")
    return [{"batch": ""} | dict(zip(head, row)) for row in rows]


def _is_point(row: list[str], columns: int) -> bool:
    try:
        return len(row) == columns and isfinite(float(row[3])) and isfinite(float(row[4]))
    except ValueError:
        return False
