"""Density of Python code: tokens per line of code, and constructions that put several thoughts in a line.

    python tools/density.py [FOLDER] [--files N]

A line of code is a line that is neither blank nor only a comment nor part of a docstring. Tokens are
names, operators, numbers and strings. A pack is an assignment of a tuple to a tuple, `a, b = x, y`.
A nested comprehension has several loops, or stands inside another.
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "cellmill"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
CODE = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


@dataclass(frozen=True)
class Density:
    """Sizes of one or more files."""

    lines: int = 0
    code: int = 0  # lines of code
    tokens: int = 0
    packs: int = 0
    walruses: int = 0
    nested: int = 0

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / max(self.code, 1)

    def per_thousand(self, construction: str) -> float:
        """Number of `packs`, `walruses` or `nested` comprehensions in 1,000 lines."""
        return 1000 * getattr(self, construction) / max(self.lines, 1)

    def __str__(self) -> str:
        rates = (f"{self.per_thousand(name):9.1f}" for name in ("packs", "walruses", "nested"))
        return f"{self.lines:8,}{self.tokens:9,}{self.tokens_per_line:8.1f}{''.join(rates)}"


HEADER = f"{'':40}{'lines':>8}{'tokens':>9}{'tok/ln':>8}{'packs':>9}{'walruses':>9}{'nested':>9}"


def lines_of_docstrings(tree: ast.Module) -> set[int]:
    """Numbers of the lines that docstrings of modules, classes and functions take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return lines


def is_pack(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def is_nested(node: ast.AST) -> bool:
    if not isinstance(node, COMPREHENSIONS):
        return False
    inner = (child for child in ast.walk(node) if child is not node)
    return len(node.generators) > 1 or any(isinstance(child, COMPREHENSIONS) for child in inner)


def measure(text: str) -> Density:
    """Density of a file with this text."""
    tree = ast.parse(text)
    documentation = lines_of_docstrings(tree)
    lines_of_code: set[int] = set()
    n_tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in CODE and token.start[0] not in documentation:
            n_tokens += 1
            lines_of_code.update(range(token.start[0], token.end[0] + 1))
    nodes = list(ast.walk(tree))
    return Density(
        lines=text.count("\n"),
        code=len(lines_of_code),
        tokens=n_tokens,
        packs=sum(is_pack(node) for node in nodes),
        walruses=sum(isinstance(node, ast.NamedExpr) for node in nodes),
        nested=sum(is_nested(node) for node in nodes),
    )


def measure_files(folder: Path) -> dict[str, Density]:
    """Density of each Python file below `folder`, by its path from there."""
    paths = sorted(folder.rglob("*.py"))
    return {path.relative_to(folder).as_posix(): measure(path.read_text("utf-8")) for path in paths}


def add_up(densities: Iterable[Density]) -> Density:
    rows = list(densities)
    sums = {field.name: sum(getattr(row, field.name) for row in rows) for field in fields(Density)}
    return Density(**sums)


def by_room(files: dict[str, Density]) -> Iterator[tuple[str, Density]]:
    """Density of each folder or file directly below the measured folder, densest first."""
    rooms = {name.partition("/")[0] for name in files}
    sums = {
        room: add_up(files[name] for name in files if name.partition("/")[0] == room)
        for room in rooms
    }
    yield from sorted(sums.items(), key=lambda item: -item[1].tokens_per_line)


def densest(files: dict[str, Density], min_code: int = 40) -> list[tuple[str, Density]]:
    """Files of at least `min_code` lines of code, densest first."""
    large = [(name, density) for name, density in files.items() if density.code >= min_code]
    return sorted(large, key=lambda item: -item[1].tokens_per_line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=SOURCE)
    parser.add_argument("--files", type=int, default=15, help="number of dense files to print")
    options = parser.parse_args()
    files = measure_files(options.folder)
    print(HEADER)
    for name, density in by_room(files):
        print(f"{name:40}{density}")
    print(f"{'all':40}{add_up(files.values())}\n")
    for name, density in densest(files)[: options.files]:
        print(f"{name:40}{density}")


if __name__ == "__main__":
    main()
