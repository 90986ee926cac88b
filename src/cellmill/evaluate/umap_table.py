"""umap.tsv: coordinates of drawn cells of all datasets."""

import csv
import io
from pathlib import Path
from typing import Any

from cellmill.errors import DataError
from cellmill.files import write_text

COLUMNS = ("dataset", "obs_name", "label", "x", "y", "heldout")


def write_umap(path: Path, rows: list[tuple[Any, ...]]) -> None:
    """Write `rows`, one value per column, as tab-separated text."""
    text = io.StringIO()
    csv.writer(text, delimiter="\t", lineterminator="\n").writerows([COLUMNS, *rows])
    write_text(path, text.getvalue())


def read_umap(path: Path) -> list[dict[str, str]]:
    """Rows as text by column; none when the file is absent. Raises DataError for other columns."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, delimiter="\t")
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise DataError(f"{path}: expected the columns {', '.join(COLUMNS)}; run evaluate again")
        return list(reader)
