"""umap.tsv, the drawn cells of an evaluation. The report reads it without umap-learn, a second's import."""

import csv
import io
from math import isfinite
from pathlib import Path
from typing import Any

from cellmill.errors import DataError
from cellmill.files import require_file, write_text

COLUMNS = ("dataset", "obs_name", "label", "x", "y", "heldout", "batch")


def write_umap(path: Path, rows: list[tuple[Any, ...]]) -> None:
    """Write `rows`, one value per column, as tab-separated text."""
    text = io.StringIO()
    csv.writer(text, delimiter="\t", lineterminator="\n").writerows([COLUMNS, *rows])
    write_text(path, text.getvalue())


def read_umap(path: Path) -> list[dict[str, str]]:
    """Rows as text by column; none when the file is absent. Raises DataError for a damaged file."""
    if not path.exists():
        return []
    require_file(path)
    rows = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = csv.reader(file, delimiter="\t")
            if tuple(next(lines, ())) != COLUMNS:
                raise ValueError(f"expected the columns {', '.join(COLUMNS)}")
            for line in lines:
                if len(line) != len(COLUMNS) or not all(isfinite(float(value)) for value in line[3:5]):
                    raise ValueError(f"expected {', '.join(COLUMNS)}")
                rows.append(dict(zip(COLUMNS, line)))
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path}, row {lines.line_num}: damaged ({error}); run evaluate again") from None
    return rows
