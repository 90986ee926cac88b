"""Sizes and laws of the source tree; `make check` prints the sizes and fails if a law is broken.

    python -m tools.house
    python -m tools.house data/shards    # also each file of that folder

Laws: imports point to the right in LAYERS, inside data/ in DATA_LAYERS, and form no circle. No
public class name exists twice. A folder has at most MAX_FILES files. A file over MAX_LINES lines
says in its docstring why it is one file. Docstrings open with a noun phrase or an imperative. Words
of DIALECT stand at most MAX_DIALECT times in a file. Names of maxima begin with `max_`. Only
PRIVATE uses private names of other packages. Code keeps the bounds of density (`tools/density.py`).
"""

import ast
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tools import density

LAYERS = (
    ("testing",),
    ("cli",),
    ("arguments",),
    ("commands", "stages"),
    ("report", "preflight"),
    ("evaluate",),
    ("train",),
    ("planner",),
    ("finetune",),
    ("models",),
    ("parallel",),
    ("track",),
    ("data",),
    ("launch",),
    ("runs",),
    ("config",),
    ("files",),
    ("errors",),
    ("imports",),
)
"""Layers of the package, left to right; rooms of one layer do not import each other."""
DATA_LAYERS = (
    ("stream",),
    ("shards",),
    ("prepare",),
    ("genes",),
    ("inputs",),
    ("fractions", "split"),
    ("loops",),
    ("packing",),
    ("arrays", "rank_order"),
    ("rows", "keys", "recycled", "saved_work", "compiled_loops"),
)
"""Layers of `cellmill.data`, likewise."""
MAX_LINES = 450
MAX_FILES = 15
MAX_TOKENS = 463_000
"""A new part raises it by its own tokens, in the same commit."""
MAX_TOKENS_PER_LINE = 9.5
MAX_TOKENS_PER_LINE_OF_A_FILE = 11.5
"""Bound for files of 40 lines of code or more."""
MAX_PER_THOUSAND = {"packs": 1, "walruses": 1, "nested": 1}
SHORT = 9
"""Lines of a private function; a shorter one that is called once had better stand where it is
called.
"""
MAX_RIDDLES_FRAC = 0.02
"""Largest share of docstrings that open with one of RIDDLES."""
RIDDLES = ("What", "Whether", "How", "Where", "Which", "When", "Of")
DIALECT = {
    "figures": r"\bfigures?\b",
    "that of, those of": r"\b(?:that|those) of\b",
    "asks, asked": r"\bask(?:s|ed)\b",
    "is no, are no": r"\b(?:is|are) no (?!longer|more)",
    "tells, told": r"\b(?:told|tells)\b",
    "goes on": r"\bgo(?:es)? on\b",
}
"""Words that this code overuses where English has a plainer one, by pattern."""
NAME_DIALECT = re.compile(r"_?most(_|$)", re.IGNORECASE)
"""Names of maxima, which are to begin with `max_`."""
OPTION_NAMES = ("most_folds", "MOST_FOLDS")
MAX_DIALECT = 2
"""Uses of each of them in one file."""
ONE_FILE = re.compile(r"\bone file\b", re.IGNORECASE)
"""What the docstring of a long file says before its reason."""
PRIVATE = "cellmill.parallel.torch_private"
"""The one module that may use private names of other packages."""
DOCUMENTED = ("_exit", "_fields")
"""Names of Python itself that are public in spite of the underscore."""
SOURCE = Path(__file__).resolve().parents[1] / "src"

Trees = dict[str, ast.Module]
Densities = dict[str, density.Density]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Files of the package by dotted module name."""
    paths = sorted((source / "cellmill").rglob("*.py"))
    return {
        ".".join(p.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): p
        for p in paths
    }


def parse(source: Path = SOURCE) -> Trees:
    """Syntax tree of each module."""
    return {
        name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules(source).items()
    }


def imports_of(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import as (statement, dotted name); names imported from a package count as its modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def wrong_layers(
    trees: Trees, package: str = "cellmill", layers: tuple[tuple[str, ...], ...] = LAYERS
) -> Iterator[str]:
    """Imports between rooms of `package` that point left, or to a room of the same layer."""
    rank = {room: rank for rank, rooms in enumerate(layers) for room in rooms}
    prefix = f"{package}."
    for name, tree in trees.items():
        if not name.startswith(prefix):
            continue
        room = name.removeprefix(prefix).split(".")[0]
        if room not in rank:
            yield f"{name} belongs to no layer of {package}"
            continue
        for statement, imported in imports_of(tree):
            if not imported.startswith(prefix):
                continue
            other = imported.removeprefix(prefix).split(".")[0]
            if other != room and other in rank and rank[other] <= rank[room]:
                yield f"{name}:{statement.lineno} imports {imported}"


def late_imports_of(tree: ast.AST) -> Iterator[str]:
    """Modules of this package that are imported by a call of import_module with their name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            if isinstance(name, str) and name.startswith("cellmill."):
                yield name


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def foreign_private(trees: Trees) -> Iterator[str]:
    """Private names outside of PRIVATE that nothing in the package defines: imported ones, and
    attributes.
    """
    every = [node for tree in trees.values() for node in ast.walk(tree)]
    own = {node.name for node in every if isinstance(node, Function | ast.ClassDef)}
    own |= {
        node.attr
        for node in every
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    own |= {
        node.id for node in every if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for name, tree in trees.items():
        if name == PRIVATE:
            continue
        for statement, imported in imports_of(tree):
            if not imported.startswith("cellmill.") and any(map(is_private, imported.split("."))):
                yield f"{name}:{statement.lineno} imports {imported}"
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and is_private(node.attr)
                and node.attr not in own | {*DOCUMENTED}
            ):
                yield f"{name}:{node.lineno} uses {ast.unparse(node)}"


def circle(trees: Trees) -> list[str]:
    """Modules of one import circle, imports for types and late ones included; empty if there is
    none.
    """
    graph = {}
    for name, tree in trees.items():
        names = [*(imported for _, imported in imports_of(tree)), *late_imports_of(tree)]
        graph[name] = {n if n in trees else n.rpartition(".")[0] for n in names} & set(trees) - {
            name
        }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def classes_twice(trees: Trees) -> Iterator[str]:
    """Public class names that exist in more than one place."""
    places = defaultdict(list)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    yield from (f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1)


def full_folders(trees: Trees) -> Iterator[str]:
    """Folders with more than MAX_FILES files, beside `__init__.py`."""
    files: dict[str, int] = defaultdict(int)
    packages = {name.rpartition(".")[0] for name in trees}
    for name in set(trees) - packages:
        files[name.rpartition(".")[0]] += 1
    yield from (f"{folder}: {n} files" for folder, n in sorted(files.items()) if n > MAX_FILES)


def called_once(trees: Trees) -> list[str]:
    """Private functions of fewer than SHORT lines that their module uses in one place."""
    found = []
    for name, tree in trees.items():
        uses: dict[str, int] = defaultdict(int)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                uses[node.id if isinstance(node, ast.Name) else node.attr] += 1
        for node in tree.body:
            short = isinstance(node, Function) and (node.end_lineno or 0) - node.lineno + 1 < SHORT
            if (
                isinstance(node, Function)
                and short
                and is_private(node.name)
                and uses[node.name] == 1
            ):
                found.append(f"{name}.{node.name}")
    return found


def long_files(source: Path = SOURCE) -> Iterator[str]:
    """Files over MAX_LINES lines whose docstring gives no reason."""
    for name, path in modules(source).items():
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > MAX_LINES and not ONE_FILE.search(
            ast.get_docstring(ast.parse(text)) or ""
        ):
            yield f"{name}: {text.count(chr(10))} lines"


def dialect(source: Path = SOURCE) -> Iterator[str]:
    """Files that use a word of DIALECT more than MAX_DIALECT times. Figures of a report are figures,
    and `figures` is the key of a task's single values in metrics.json.
    """
    for name, path in modules(source).items():
        text = path.read_text(encoding="utf-8")
        for word, pattern in DIALECT.items():
            is_named_so = word == "figures" and ("report" in name or "evaluate" in name)
            n = len(re.findall(pattern, text))
            if n > MAX_DIALECT and not is_named_so:
                yield f"{name}: {word!r} {n} times"


def names_in_dialect(trees: Trees) -> Iterator[str]:
    """Variables, arguments and functions whose names match NAME_DIALECT, except OPTION_NAMES."""
    for module, tree in trees.items():
        for node in ast.walk(tree):
            name = ""
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, Function):
                name = node.name
            if NAME_DIALECT.match(name) and name not in OPTION_NAMES:
                yield f"{module}:{getattr(node, 'lineno', 1)} {name}"


def docstrings(trees: Trees) -> Iterator[tuple[str, str]]:
    """Every docstring with the place it stands at."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            documented = isinstance(node, ast.Module | ast.ClassDef | Function)
            if documented and (text := ast.get_docstring(node)):
                yield f"{name}:{getattr(node, 'lineno', 1)}", text


def riddles(trees: Trees) -> list[str]:
    """Places of docstrings that open with one of RIDDLES."""
    opening = re.compile(rf"({'|'.join(RIDDLES)})\b")
    return [place for place, text in docstrings(trees) if opening.match(text)]


def function_lengths(trees: Trees) -> list[int]:
    """Lines of each function's body, docstring excluded."""
    functions = (
        node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function)
    )
    bodies = [node.body[1:] if ast.get_docstring(node) else node.body for node in functions]
    return [(body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0 for body in bodies]


def print_room(room: str, trees: Trees) -> None:
    """Density, functions used once and dialect of the modules in folder `room` of the package."""
    prefix = f"cellmill.{room.strip('/').replace('/', '.')}"
    densities = density.measure_files(density.SOURCE / room)
    print(density.HEADER)
    for name, row in sorted(densities.items()):
        print(f"{name:40}{row}")
    print(f"{room:40}{density.add_up(densities.values())}")
    for line in (*called_once(trees), *dialect()):
        if line.startswith(prefix):
            print(f"    {line}")


def dense_code(files: Densities) -> Iterator[str]:
    """Bounds of `density` that all files together, or one file, do not keep."""
    total = density.add_up(files.values())
    if total.tokens > MAX_TOKENS:
        yield (
            f"{total.tokens:,} tokens, at most {MAX_TOKENS:,}; a new task, objective, family or "
            "format raises MAX_TOKENS by its own tokens, other changes take code out"
        )
    if total.tokens_per_line > MAX_TOKENS_PER_LINE:
        yield f"{total.tokens_per_line:.1f} tokens per line of code, at most {MAX_TOKENS_PER_LINE:g}"
    for construction, most in MAX_PER_THOUSAND.items():
        rate = total.per_thousand(construction)
        if rate > most:
            yield f"{rate:.1f} {construction} in 1,000 lines, at most {most:g}"
    for name, row in density.densest(files):
        if row.tokens_per_line > MAX_TOKENS_PER_LINE_OF_A_FILE:
            yield f"{name}: {row.tokens_per_line:.1f} tokens per line of code"


def print_sizes(trees: Trees, files: Densities) -> None:
    """Print density by room, and sizes of files, functions and docstrings."""
    print(density.HEADER)
    for room, row in density.by_room(files):
        print(f"{room:40}{row}")
    print(f"{'src':40}{density.add_up(files.values())}")
    longest = max(files, key=lambda name: files[name].lines)
    print(f"longest of {len(files)} files    {files[longest].lines} lines, {longest}")
    print(f"private, short, used once  {len(called_once(trees))} functions")
    lengths = function_lengths(trees)
    median = statistics.median(lengths)
    p90 = statistics.quantiles(lengths, n=10)[-1]
    print(f"lines of a function     median {median:g}, p90 {p90:g}, most {max(lengths)}")


def main(rooms: list[str]) -> int:
    """Print the sizes, of `rooms` in detail, and broken laws; 1 if any is broken."""
    trees = parse()
    files = density.measure_files(density.SOURCE)
    print_sizes(trees, files)
    for room in rooms:
        print_room(room, trees)
    odd = riddles(trees)
    n_docstrings = sum(1 for _ in docstrings(trees))
    too_odd = len(odd) > MAX_RIDDLES_FRAC * n_docstrings
    cycle = circle(trees)
    laws = {
        "import circle": [" -> ".join(cycle)] if cycle else [],
        "imports against the layers": [
            *wrong_layers(trees),
            *wrong_layers(trees, "cellmill.data", DATA_LAYERS),
        ],
        "private names of other packages": list(foreign_private(trees)),
        "class names twice": list(classes_twice(trees)),
        f"words of DIALECT over {MAX_DIALECT} times in a file": list(dialect()),
        "maxima whose names begin with `most_`, not `max_`": list(names_in_dialect(trees)),
        f"folders of more than {MAX_FILES} files": list(full_folders(trees)),
        f"files over {MAX_LINES} lines without a reason": list(long_files()),
        f"docstrings that open with {', '.join(RIDDLES)}, over the limit": odd if too_odd else [],
        "bounds of density": list(dense_code(files)),
    }
    for law, broken in laws.items():
        print(f"{law}: {len(broken) or 'none'}" + "".join(f"\n    {line}" for line in broken))
    return 1 if any(laws.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
