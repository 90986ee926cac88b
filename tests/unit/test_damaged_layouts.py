"""Text layouts with one line or field too many or too few: the counts that are read are those of
the truth, or none.
"""

import gzip
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cellmill.errors import UserError
from tests.unit.test_matrix_market import LAYOUTS, TRUTH, Counts, read
from tests.unit.test_text_counts import TABLES

Lines = list[str]


JUNK = ["junk", "1", "1 1 1", "a\tb", "%", "#", ",,", "\x00", "é"]
SEPARATORS = "\t,; "


def delete(lines: Lines, draw: random.Random) -> Lines:
    del lines[draw.randrange(len(lines))]
    return lines


def repeat(lines: Lines, draw: random.Random) -> Lines:
    number = draw.randrange(len(lines))
    lines.insert(number, lines[number])
    return lines


def cut_after(lines: Lines, draw: random.Random) -> Lines:
    return lines[: draw.randrange(len(lines))]


def add_blank(lines: Lines, draw: random.Random) -> Lines:
    return lines + [""] * draw.randrange(1, 4)


def add_junk(lines: Lines, draw: random.Random) -> Lines:
    number = draw.randrange(len(lines) + 1)
    lines.insert(number, draw.choice(JUNK))
    return lines


def cut_field(lines: Lines, draw: random.Random) -> Lines:
    number = draw.randrange(len(lines))
    line = lines[number]
    last_separator = max(line.rfind(separator) for separator in SEPARATORS)
    lines[number] = line[: max(0, last_separator)]
    return lines


def add_field(lines: Lines, draw: random.Random) -> Lines:
    number = draw.randrange(len(lines))
    line = lines[number]
    used = [separator for separator in SEPARATORS if separator in line]
    lines[number] = f"{line}{[*used, SEPARATORS[0]][0]}7"
    return lines


def end_as_windows(lines: Lines, draw: random.Random) -> Lines:
    return [f"{line}\r" for line in lines]


CHANGES = (delete, repeat, cut_after, add_blank, add_junk, cut_field, add_field, end_as_windows)


def damage(folder: Path, draw: random.Random) -> str:
    """Change one file in place, and return how."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    file = draw.choice(sorted(files))
    open_file: Any = gzip.open if file.suffix == ".gz" else open
    with open_file(file, "rt", newline="", encoding="utf-8") as stream:
        lines = stream.read().splitlines()
    change = draw.choice(CHANGES)
    changed = change(lines, draw)
    with open_file(file, "wt", newline="", encoding="utf-8") as stream:
        stream.write("\n".join([*changed, ""]))
    return f"{change.__name__} in {file.name}"


WRITERS: dict[str, tuple[Callable[[Path], object], str]] = dict(LAYOUTS)
WRITERS |= {name: (write, "table") for name, write in TABLES.items()}


@pytest.mark.parametrize("number", [10, pytest.param(150, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", WRITERS)
def test_a_damaged_layout_never_gives_a_wrong_count(name: str, number: int, tmp_path: Path) -> None:
    write, file = WRITERS[name]
    whole = tmp_path / "whole"
    work = tmp_path / "work"
    whole.mkdir()
    written = write(whole)
    if file == "table":
        file = Path(str(written)).name
    for seed in range(number):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(whole, work)
        change = damage(work, random.Random(f"{name} {seed}"))
        counts: Counts = {}
        message = ""
        try:
            counts = read(work / file)
        except UserError as error:
            message = str(error)
        assert "\n" not in message, (seed, change)
        # a field of a damaged line may be read as a new name; a cell or gene may be lost
        for key, count in counts.items():
            if key in TRUTH:
                assert count == TRUTH[key], (seed, change, key)
