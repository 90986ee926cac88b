"""The tests themselves: their names, and the faults that `tests/mutations.py` plants."""

import ast
from pathlib import Path

import pytest

from tests.mutations import FAULTS, ROOT, Fault

MAX_CHARACTERS = 60
"""Of the name of a test, which states one claim."""


def read_names(path: Path) -> list[str]:
    """Names of the test functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [function.name for function in functions if function.name.startswith("test_")]


def test_names_of_tests_are_short() -> None:
    long_names = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name in read_names(path):
            if len(name) > MAX_CHARACTERS:
                long_names.append(f"{path.relative_to(ROOT)}: {name}: {len(name)} characters")
    assert not long_names


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_finds_its_line(fault: Fault) -> None:
    source = (ROOT / "src" / "cellmill" / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.before) == 1, f"{fault.file}: expected once: {fault.before!r}"
    for name in fault.tests.split():
        assert (ROOT / "tests" / name).is_file(), f"{name} is not a file of tests"
