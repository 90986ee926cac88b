"""scores.csv: the numbers of all tables of an evaluation, one a line."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cellmill.files import atomic_path

FIELDS = ("dataset", "task", "name", "kind", "column", "statistic", "repetition", "value")
STATISTICS = ("mean", "sd", "repetitions")
"""Endings of the keys of rows; other keys are single values."""


def write_scores(path: Path, datasets: Mapping[str, Any]) -> None:
    """Write the rows of `datasets`, that of metrics.json, to `path`."""
    with atomic_path(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows(_lines(datasets))


def _lines(datasets: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for dataset, entry in datasets.items():
        for task, result in entry["tasks"].items():
            for row in result["rows"]:
                about = dataset, task, row["name"], row.get("kind", "")
                for key, value in row.items():
                    if key not in ("name", "kind"):
                        yield from ((*about, *line) for line in _values(key, value))


def _values(key: str, value: Any) -> Iterator[tuple[Any, ...]]:
    """Column, statistic, repetition and value; nothing for what is no number."""
    column, _, ending = key.rpartition("_")
    column, statistic = (column, ending) if column and ending in STATISTICS else (key, "value")
    for repetition, one in enumerate(value if isinstance(value, list) else [value]):
        if isinstance(one, int | float):
            yield column, statistic.removesuffix("s"), repetition if isinstance(value, list) else "", one
