"""The layers of the package: imports point right only, none hides in a function, and what must stay light does."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LAYERS = (
    *(("cli",), ("commands", "stages"), ("report", "preflight"), ("evaluate",), ("train",), ("planner",)),
    *(("finetune",), ("models",), ("parallel",), ("track",), ("data",), ("launch",), ("runs",)),
    *(("config",), ("registry",), ("files",), ("errors",)),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
HEAVY = ("torch", "pandas", "anndata", "h5py", "scipy", "sklearn", "matplotlib", "numpy")
SOURCE = Path(__file__).resolve().parents[2] / "src"


def modules() -> list[Path]:
    return sorted((SOURCE / "cellmill").rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import of a module as (statement, dotted name); names imported from a package count as its modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_module_belongs_to_a_layer() -> None:
    tops = {name_of(path).split(".")[1] for path in modules() if name_of(path) != "cellmill"}
    assert tops <= set(RANK), f"no layer: {sorted(tops - set(RANK))}"


def test_imports_point_right_only() -> None:
    wrong = []
    for path in modules():
        if (name := name_of(path)) == "cellmill":
            continue
        own = name.split(".")[1]
        for statement, imported in imports_of(ast.parse(path.read_text())):
            parts = imported.split(".")
            if parts[0] == "cellmill" and parts[1] in RANK and parts[1] != own and RANK[parts[1]] <= RANK[own]:
                wrong.append(f"{path.relative_to(SOURCE)}:{statement.lineno} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_no_import_hides_inside_a_function() -> None:
    hidden = []
    for path in modules():
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                found = [node for node, _ in imports_of(function)]
                hidden += [f"{path.relative_to(SOURCE)}:{node.lineno}" for node in found]
    assert not hidden, f"imports inside functions: {hidden}"


def loaded_by(*names: str) -> set[str]:
    """Which of HEAVY are in memory after a fresh Python imported these modules."""
    lines = [f"import {name}" for name in names]
    code = "\n".join([*lines, "import sys", f"print(*[name for name in {HEAVY!r} if name in sys.modules])"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def in_layers(*layers: str) -> list[str]:
    return [name for path in modules() if (name := name_of(path)).partition(".")[2].split(".")[0] in layers]


def test_what_the_workflow_and_a_launcher_import_is_light() -> None:
    families = [name for name in in_layers("models") if name.endswith(".config")]
    assert families
    light = [*in_layers("cli", "launch", "config", "registry", "files", "errors"), *families]
    assert loaded_by(*light) == set()


@pytest.mark.parametrize("layer", ["data", "track"])
def test_the_layer_imports_no_torch(layer: str) -> None:
    assert "torch" not in loaded_by(*in_layers(layer))


@pytest.mark.parametrize("stage", ["demo", "simulate", "preprocess", "vocabulary", "shard", "plan", "train", "report"])
def test_the_stage_imports_no_torch(stage: str) -> None:
    assert "torch" not in loaded_by(f"cellmill.stages.{stage}")
