"""`tools.density` against counts made by hand."""

from pathlib import Path

from tools import density

CODE = '''"""Title of
the file.
"""

# a comment

def add(left, right):
    """Add."""
    a, b = left, right
    if (total := a + b) > 0:  # a comment after code
        return [[x for x in row] for row in total]
    a, b = b, a
    return {x for row in total for x in row}
'''


def test_constructions_are_counted() -> None:
    measured = density.measure(CODE)
    assert measured.packs == 2
    assert measured.walruses == 1
    assert measured.nested == 2


def test_only_lines_with_code_count() -> None:
    measured = density.measure(CODE)
    assert measured.lines == 13
    assert measured.code == 6
    by_line = (8, 7, 11, 14, 7, 12)
    assert measured.tokens == sum(by_line)


def test_densities_of_files_add_up_to_those_of_rooms(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "one.py").write_text(CODE)
    (tmp_path / "room" / "two.py").write_text("x = 1\n")
    files = density.measure_files(tmp_path)
    assert sorted(files) == ["room/one.py", "room/two.py"]
    [(room, total)] = density.by_room(files)
    assert room == "room"
    assert total.tokens == files["room/one.py"].tokens + 3
    assert total.lines == 14
