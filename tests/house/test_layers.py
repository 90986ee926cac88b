"""The shape of the package: import layers, no circles, unique names, no import inside a function, light modules."""

import ast
import subprocess
import sys

import pytest

from tools import house

HEAVY = ("torch", "pandas", "anndata", "h5py", "scipy", "sklearn", "matplotlib", "numpy")
LATE = (
    *("anndata", "pandas", "umap", "sklearn", "numba", "scipy.stats", "scipy.optimize", "sympy", "torch._dynamo"),
    *("torch.distributed.checkpoint", "torch.distributed.pipelining", "torch.distributed.tensor"),
)
"""Modules that take 0.1 to 1.5 s to import."""
TREES = house.parse()


def test_the_laws_of_the_source_tree_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert house.main([]) == 0, capsys.readouterr().out


def test_no_import_hides_inside_a_function() -> None:
    functions = [
        (name, node) for name, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, house.Function)
    ]
    hidden = [f"{name}:{line.lineno}" for name, node in functions for line, _ in house.imports_of(node)]
    assert hidden == [], f"imports inside functions: {hidden}"


def loaded_by(*names: str, among: tuple[str, ...] = HEAVY, then: str = "") -> set[str]:
    """Packages that are in memory after a fresh Python has imported these modules and run the lines `then`."""
    lines = [f"import {name}" for name in names]
    code = "\n".join([*lines, then, "import sys", f"print(*[name for name in {among!r} if name in sys.modules])"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def in_layers(*layers: str) -> list[str]:
    return [name for name in TREES if name.partition(".")[2].split(".")[0] in layers]


def test_the_workflow_and_the_launcher_import_light_modules_only() -> None:
    light = in_layers("cli", "launch", "config", "files", "errors")
    assert "cellmill.config.parts.families" in light
    assert loaded_by(*(name for name in light if name != "cellmill.launch.agent")) == set()  # it is a job's process


@pytest.mark.parametrize("name", ["data", "track", "stages.data", "stages.report", "commands.preflight"])
def test_the_layer_or_module_imports_no_torch(name: str) -> None:
    extras = "cellmill.track.to_"  # each imports a package that may be absent
    modules = [f"cellmill.{name}"] if "." in name else in_layers(name)
    assert "torch" not in loaded_by(*(module for module in modules if not module.startswith(extras)))


@pytest.mark.parametrize(
    ("module", "used"),
    [("stages.train", {"numpy", "submitit"}), ("commands.status", set()), ("commands.run", set())],
)
def test_a_launcher_and_the_commands_on_runs_import_no_heavy_library(module: str, used: set[str]) -> None:
    # a launcher's memory is that of its imports, and a workflow may have hundreds of it
    assert loaded_by(f"cellmill.{module}", among=(*HEAVY, "submitit")) == used


def test_the_process_that_walks_an_input_first_imports_h5py_alone() -> None:
    assert loaded_by("cellmill.data.inputs.h5_walk") == {"h5py", "numpy"}  # one starts for each input that is opened


SHARDED = {"sympy", "torch.distributed.tensor"}


@pytest.mark.parametrize(
    ("module", "used"),
    [
        ("stages.data", {"anndata", "pandas"}),
        ("stages.train", set()),
        ("stages.plan", SHARDED),
        ("stages.export", {"anndata", "pandas", "torch.distributed.checkpoint"} | SHARDED),
        ("stages.cells", {"anndata", "pandas"}),
        ("stages.report", set()),
        ("train.worker", {"torch.distributed.checkpoint"} | SHARDED),
    ],
)
def test_a_stage_or_rank_imports_no_slow_module_that_it_does_not_use(module: str, used: set[str]) -> None:
    assert loaded_by(f"cellmill.{module}", among=LATE) <= used


def test_a_model_is_built_and_filled_without_the_compiler_and_tensors_of_a_mesh() -> None:
    lines = (
        "from cellmill.models.build import build",
        "from cellmill.parallel.materialize import to_empty",
        "from tests.models import spec",
        "to_empty(build(spec(9)), 'cpu')",
    )
    assert loaded_by(among=LATE, then="\n".join(lines)) == set()
