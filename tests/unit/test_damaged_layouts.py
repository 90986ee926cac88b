"""Text layouts with one line or field too many or too few: the counts that are read are those of
the truth, or none.
"""

import gzip
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cellmill.errors import UserError
from tests.unit.test_matrix_market import LAYOUTS, TRUTH, read
from tests.unit.test_text_counts import TABLES

Lines = list[str]


def delete(lines: Lines, draw: random.Random) -> Lines:
    at = draw.randrange(len(lines))
    return lines[:at] + lines[at + 1 :]


def repeat(lines: Lines, draw: random.Random) -> Lines:
    at = draw.randrange(len(lines))
    return lines[: at + 1] + lines[at:]


def cut_after(lines: Lines, draw: random.Random) -> Lines:
    return lines[: draw.randrange(len(lines))]


def add_blank(lines: Lines, draw: random.Random) -> Lines:
    return lines + [""] * draw.randrange(1, 4)


def add_junk(lines: Lines, draw: random.Random) -> Lines:
    at = draw.randrange(len(lines) + 1)
    return [
        *lines[:at],
        draw.choice(["junk", "1", "1 1 1", "a\tb", "%", "#", ",,", "\x00", "é"]),
        *lines[at:],
    ]


def cut_field(lines: Lines, draw: random.Random) -> Lines:
    at = draw.randrange(len(lines))
    line = lines[at]
    stop = max(line.rfind(mark) for mark in "\t,; ")
    return [*lines[:at], line[: max(0, stop)], *lines[at + 1 :]]


def add_field(lines: Lines, draw: random.Random) -> Lines:
    at = draw.randrange(len(lines))
    mark = next((mark for mark in "\t,; " if mark in lines[at]), "\t")
    return [*lines[:at], f"{lines[at]}{mark}7", *lines[at + 1 :]]


def end_as_windows(lines: Lines, draw: random.Random) -> Lines:
    return [f"{line}\r" for line in lines]


CHANGES = (delete, repeat, cut_after, add_blank, add_junk, cut_field, add_field, end_as_windows)


def damage(folder: Path, draw: random.Random) -> str:
    """Change one file in place, and say how."""
    file = draw.choice(sorted(file for file in folder.rglob("*") if file.is_file()))
    content = file.read_bytes()
    text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
    change = draw.choice(CHANGES)
    lines = text.splitlines()
    changed = "\n".join([*change(lines, draw), ""]).encode()
    file.write_bytes(gzip.compress(changed) if file.suffix == ".gz" else changed)
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
    path = work / (Path(str(written)).name if file == "table" else file)
    faults: list[str] = []
    for seed in range(number):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(whole, work)
        draw = random.Random(f"{name} {seed}")
        how = damage(work, draw)
        try:
            found = read(path)
        except UserError as error:
            faults = [*faults, how] if "\n" in str(error) else faults
            continue
        # a name that is a field of a damaged line is no name of the truth; a cell or gene that is
        # lost is not wrong
        known = {key: count for key, count in found.items() if key in TRUTH}
        wrong = {key: count for key, count in known.items() if count != TRUTH[key]}
        faults = [*faults, f"seed {seed}: {how}: {wrong}"[:300]] if wrong else faults
    assert not faults
